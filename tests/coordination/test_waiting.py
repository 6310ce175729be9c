"""Who is waited for is said."""

import socket

import tensorflow as tf

from tfparallel.coordination.waiting import report_absent_peers


def test_names_the_peer_that_cannot_be_reached(monkeypatch):
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *a: said.append(text % a))
    with socket.create_server(("127.0.0.1", 0)) as present, socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can take it
        peers = [f"127.0.0.1:{s.getsockname()[1]}" for s in (present, absent)]
        report_absent_peers(3, peers)
        report_absent_peers(3, peers[:1])
    assert len(said) == 1
    assert "[rank 3]" in said[0]
    assert peers[1] in said[0]
    assert peers[0] not in said[0]
