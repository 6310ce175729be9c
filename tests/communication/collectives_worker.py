"""A worker of `test_collectives.py`: asks TensorFlow's collectives, which its strategy holds."""

import json
import os
import sys

import tensorflow as tf

import tfparallel
from tests.communication.collective_claims import all_differences


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    extended = tfparallel.MultiWorkerMirroredStrategy(communication_options=options).extended
    collectives = extended._collectives
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for _ in sys.stdin:
        found = all_differences(collectives, in_function=True)
        print(json.dumps(found), file=replies, flush=True)


if __name__ == "__main__":
    main()
