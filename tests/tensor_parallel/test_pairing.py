"""Which layers are cut how, as tables: calls in, decisions out."""

from tfparallel.tensor_parallel.pairing import Call, decisions


def _dense(name, x, y, units=8, features=8, flops=100):
    return Call(
        name, (x,), (y,), {"column": units, "row": features}, {"column": 1, "row": 1}, flops
    )


def _passing(name, xs, y):
    return Call(name, tuple(xs), (y,), passes=True)


def _ways(calls, borders=("in", "out"), parts=2):
    return {layer: decision.way for layer, decision in decisions(calls, borders, parts).items()}


def test_two_layers_with_an_activation_between_them_are_a_pair():
    calls = [_dense("a", "in", 1), _passing("gelu", [1], 2), _dense("b", 2, "out")]
    assert _ways(calls) == {"a": "column", "b": "row"}


def test_a_gate_and_what_it_gates_are_cut_alike():
    calls = [
        _dense("gate", "in", 1),
        _dense("up", "in", 2),
        _passing("times", [1, 2], 3),
        _dense("down", 3, "out"),
    ]
    assert _ways(calls) == {"gate": "column", "up": "column", "down": "row"}


def test_of_pairs_that_overlap_the_larger_one_is_taken():
    calls = [
        _dense("a", "in", 1, flops=10),
        _dense("b", 1, 2, flops=100),
        _dense("c", 2, "out", flops=100),
    ]
    assert _ways(calls) == {"b": "column", "c": "row", "a": "column"}
    assert decisions(calls, ("in", "out"), 2)["a"].reason == "no partner: gathered"


def test_what_another_layer_reads_is_no_pair():
    norm = Call("norm", (1,), (2,))
    calls = [_dense("a", "in", 1), norm, _dense("b", 1, 3), _dense("c", 3, "out")]
    assert _ways(calls) == {"a": "column", "b": "column", "c": "row"}


def test_an_output_of_the_model_is_gathered():
    calls = [_dense("a", "in", 1), _dense("b", 1, "out")]
    assert _ways(calls, borders=("in", 1, "out")) == {"a": "column", "b": "column"}


def test_a_tensor_that_no_layer_made_is_no_pair():
    """Such as the sum of two, computed by a model's own `call`."""
    calls = [_dense("a", "in", 1), _dense("b", "1 + x", "out")]
    assert _ways(calls) == {"a": "column", "b": "column"}


def test_sizes_that_differ_are_no_pair():
    """A reshape between them."""
    calls = [_dense("a", "in", 1, units=8), _dense("b", 1, "out", features=4)]
    assert "row" not in _ways(calls).values()


def test_what_is_between_a_pair_has_its_weights_cut_alike():
    norm = Call("norm", (1,), (2,), {"aligned": 8}, passes=True)
    calls = [_dense("a", "in", 1), norm, _dense("b", 2, "out")]
    assert _ways(calls) == {"a": "column", "norm": "aligned", "b": "row"}


def test_what_passes_on_a_whole_keeps_its_weights_whole():
    norm = Call("norm", ("in",), (1,), {"aligned": 8}, passes=True)
    assert _ways([norm, _dense("a", 1, 2), _dense("b", 2, "out")]) == {"a": "column", "b": "row"}


def test_a_layer_called_twice_is_cut_one_way():
    calls = [
        _dense("shared", "in", 1),
        _dense("b", 1, 2),
        _dense("shared", 2, 3),
        _dense("c", 3, "out"),
    ]
    assert _ways(calls) == {"shared": "column", "b": "row", "c": "row"}


def test_a_layer_that_leads_into_itself_has_no_partner():
    calls = [_dense("shared", "in", 1), _dense("shared", 1, "out")]
    assert _ways(calls) == {"shared": "column"}


def test_small_layers_without_a_partner_stay_whole():
    calls = [_dense("a", "in", 1), _dense("b", 1, 2), _dense("head", 2, "out", flops=1)]
    found = decisions(calls, ("in", "out"), 2)
    assert (found["head"].way, found["head"].reason) == ("", "no partner, 0.5% of the products")


def test_what_has_too_few_indices_says_so():
    heads = Call("attention", (1,), (2,), {"heads": 3}, flops=100)
    found = decisions([_dense("a", "in", 1, 2, 2), heads], ("in", 2), 4)
    assert found["attention"].reason == "3 heads for 4 devices"
    assert found["a"].reason == "2 indices for 4 devices"


def test_heads_and_tokens_need_no_partner():
    calls = [
        Call("tokens", ("in",), (1,), {"tokens": 9, "column": 4}),
        Call("attention", (1,), ("out",), {"heads": 4}, flops=1),
    ]
    assert _ways(calls) == {"tokens": "tokens", "attention": "heads"}
