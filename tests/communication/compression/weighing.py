"""What `Adaptive` finds a payload to take, in this process: `python -m` prints seconds as JSON.

The smallest sum, and two payloads, over a link on which a payload takes `PAYLOAD_S`.
"""

import json
import time

import tensorflow as tf

from tfparallel.compression import Adaptive

PAYLOAD_S = 0.2


class SlowLink:
    """One rank, whose sums sleep."""

    rank, world_size = 0, 1

    def all_reduce_sum(self, tensors):
        def send(values):
            time.sleep(PAYLOAD_S * (values.size > 1))
            return values

        return [tf.numpy_function(send, [tensor], tensor.dtype) for tensor in tensors]


def main() -> None:
    """Weighs one payload."""
    reducer = Adaptive().reducer([[(8, 8)]] * 2, late_counts=True)
    reducer._payload_bytes.assign(4096)
    _, trip_s, payload_s = tf.function(lambda: reducer._weighed(SlowLink()))()
    print(json.dumps([*trip_s.numpy().tolist(), *payload_s.numpy().tolist()]))


if __name__ == "__main__":
    main()
