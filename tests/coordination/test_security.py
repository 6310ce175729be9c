import pytest

from tfparallel.coordination.security import check_network, is_loopback

LOOPBACK = {"chief": ["127.0.0.1:1"], "worker": ["localhost:2", "[::1]:3"]}
EXPOSED = {"chief": ["127.0.0.1:1"], "ps": ["10.0.0.7:2222"]}


def test_loopback_needs_no_word(recwarn):
    check_network(LOOPBACK, insecure_network=False, environ={})
    assert not recwarn.list


def test_other_addresses_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="10.0.0.7:2222.*authentication.*insecure_network=True"):
        check_network(EXPOSED, insecure_network=False, environ={})


@pytest.mark.parametrize(
    "flag, environ", [(True, {}), (False, {"TFPARALLEL_INSECURE_NETWORK": "1"})]
)
def test_the_users_word_turns_the_error_into_a_warning(flag, environ):
    with pytest.warns(UserWarning, match="without any authentication.*firewall"):
        check_network(EXPOSED, flag, environ)


@pytest.mark.parametrize(
    "address, expected",
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("localhost.example.org:1", False),
        ("worker-0:1", False),
        ("192.168.1.2:1", False),
    ],
)
def test_loopback_is_told_without_looking_names_up(address, expected):
    assert is_loopback(address) is expected
