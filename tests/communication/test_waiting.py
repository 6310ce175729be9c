"""Who is waited for is said."""

import socket
import time

import tensorflow as tf

from tfparallel.communication.waiting import reporting_absent_peers


def test_names_the_peer_that_cannot_be_reached(monkeypatch):
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *a: said.append(text % a))
    with socket.create_server(("127.0.0.1", 0)) as present, socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can take it
        peers = [f"127.0.0.1:{s.getsockname()[1]}" for s in (present, absent)]
        with reporting_absent_peers(3, peers, every_s=0.05):
            while not said:
                time.sleep(0.05)
    assert "[rank 3]" in said[0]
    assert peers[1] in said[0]
    assert peers[0] not in said[0]
