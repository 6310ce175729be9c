"""A process that all-reduces under TensorFlow, as told by `allreduce.py`."""

import protocol
import tensorflow as tf


class AllReduce:
    """What `allreduce.py` asks of a process.

    Args:
        strategy: "horovod" or "multi_worker".
        call: "strategy" (ours), "stock" (TensorFlow's strategy) or "raw" (the transport itself).
    """

    def __init__(self, *, strategy, call, **_):
        if call == "raw":
            import horovod.tensorflow as hvd

            hvd.init()
            self._function = tf.function(
                lambda x: hvd.allreduce(x, name=f"x{x.shape[0]}", op=hvd.Sum)
            )
            return
        if call == "stock":
            package = tf.distribute
        else:
            import tfparallel as package
        name = {"horovod": "HorovodStrategy", "multi_worker": "MultiWorkerMirroredStrategy"}
        self._strategy = getattr(package, name[strategy])()
        replica = tf.distribute.get_replica_context

        @tf.function
        def all_reduce(x):
            return self._strategy.run(
                lambda x: replica().all_reduce("SUM", tf.identity(x)), args=(x,)
            )

        self._function = all_reduce

    def timed(self, size: int, steps: int) -> list[float]:
        """Seconds of each of `steps` all-reduces of `size` bytes.

        Raises:
            ArithmeticError: if a sum is wrong.
        """
        x = tf.ones([size // 4])
        result = self._function(x)
        if float(result[-1]) != 2.0:
            raise ArithmeticError(f"Expected a sum of 2. Received: {float(result[-1])}.")
        return protocol.timed_steps(lambda: self._function(x)[0].numpy(), steps, 2)["wall_s"]


if __name__ == "__main__":
    protocol.serve(AllReduce)
