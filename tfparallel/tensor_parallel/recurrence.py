"""A recurrence by units: each device computes its units of every step, from the states of all.

    forward    h0 h1  -- each device gets all -->  r_i = [h0 h1] U_i  ->  its gates  ->  its h_i
    backward   dr_i U_i^T, of all units, on each device  -- summed where they belong -->  dh_i

Both are one loop over all devices. The gradient is written here, and recorded as that of one
operation: that of a loop would be computed on one device. The kernels' gradients are products over
all steps at once, after the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.tensor_parallel.known_parts import cut_apart
from tfparallel.tensor_parallel.rows import Rows

Parts = list[tf.Tensor]  # one on each device
Carry = list[tf.Tensor]  # of one device: its part of the states, h first, then its last output


@dataclass(frozen=True)
class Recurrence:
    """One call of an RNN.

    Attributes:
        devices: of the group.
        sizes: how many units each has.
        gates: `(x, r, states) -> states`, of single units: what a step makes of its input's and its
            states' products, and of its states; the first of them, h, is the output too.
        drops: of h, each `[rows, units]`; one for all gates, or one for each; none without dropout.
        mask: `[steps, rows, 1]`, where a step counts; None for everywhere.
    """

    devices: Sequence[str]
    sizes: tuple[int, ...]
    gates: Callable
    drops: Sequence[tf.Tensor] = ()
    mask: Any = None

    def run(self, xs: Parts, kernels: Parts, biases: Parts, states: list[Carry]) -> tuple:
        """All steps. Tapes see the outputs as computed from what is given.

        Args:
            xs: products of the input, `[steps, rows, gates * own units]`.
            kernels: recurrent ones, `[units, gates * own units]`.
            biases: of what they give, `[gates * own units]`.
            states: of each device, `[rows, own units]` each, as they begin.

        Returns:
            Outputs after each step, `[steps, rows, own units]`, for each device, and what each
            carries in the end: its states and its last output.
        """
        carries = [[*each, tf.zeros_like(each[0])] for each in states]
        outputs, products, before, ends = self._forward(xs, kernels, biases, carries)
        inputs = [*xs, *kernels, *biases, *_flat(states)]
        with record.stop_recording():
            results = [tf.identity(x) for x in (*outputs, *_flat(ends))]

        def backward(*gradients: tf.Tensor) -> list:
            count = len(self.devices)
            of_ends = _of_devices(gradients[count:], count)
            return self._backward(
                xs, kernels, biases, products, before, list(gradients[:count]), of_ends
            )

        record.record_operation("Recurrence", results, inputs, backward)
        count = len(self.devices)
        return results[:count], _of_devices(results[count:], count)

    # ---- one step --------------------------------------------------------------------------------

    def _product(self, h: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """`h` `[..., units]` times the kernel, dropped as each gate has it."""
        if len(self.drops) > 1:
            kernels = tf.split(kernel, len(self.drops), 1)
            pairs = zip(self.drops, kernels, strict=True)
            return tf.concat([tf.matmul(h * drop, k) for drop, k in pairs], -1)
        return tf.matmul(h * self.drops[0] if self.drops else h, kernel)

    def _gradient_of_h(self, gradient: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Of `_product` for its `h` `[rows, units]`."""
        if len(self.drops) > 1:
            kernels = tf.split(kernel, len(self.drops), 1)
            gates = zip(self.drops, tf.split(gradient, len(self.drops), -1), kernels, strict=True)
            return sum_in_order([drop * tf.matmul(g, k, transpose_b=True) for drop, g, k in gates])
        of_h = tf.matmul(gradient, kernel, transpose_b=True)
        return of_h * self.drops[0] if self.drops else of_h

    def _step(self, x: tf.Tensor, r: tf.Tensor, carry: Carry, mask: object) -> Carry:
        """What a device carries after a step."""
        *states, last = carry
        new = self.gates(x, r, states)
        new = [*new, new[0]]
        if mask is None:
            return new
        old = zip(new, (*states, last), strict=True)
        return [tf.where(mask, after, before) for after, before in old]

    def _mask_of(self, step: tf.Tensor) -> object:
        return None if self.mask is None else tf.gather(self.mask, step)

    # ---- all steps -------------------------------------------------------------------------------

    def _forward(self, xs: Parts, kernels: Parts, biases: Parts, carries: list[Carry]) -> tuple:
        """Outputs, products of h, and states before each step, of each device; what is carried."""
        steps = tf.shape(xs[0])[0]
        like = [[carry[0], x, *carry[:-1]] for x, carry in zip(xs, carries, strict=True)]
        arrays = self._arrays(like, steps)

        def body(t: tf.Tensor, carries: list, arrays: list) -> tuple:
            mask, after, written = self._mask_of(t), [], []
            for i, device in enumerate(self.devices):
                with tf.device(device):
                    h = tf.concat([carry[0] for carry in carries], -1)
                    r = self._product(h, kernels[i]) + biases[i]
                    new = self._step(tf.gather(xs[i], t), r, carries[i], mask)
                    new = [_as(x, old) for x, old in zip(new, carries[i], strict=True)]
                    values = [new[-1], r, *carries[i][:-1]]
                    written.append([a.write(t, v) for a, v in zip(arrays[i], values, strict=True)])
                after.append(new)
            return t + 1, after, written

        _, ends, arrays = tf.while_loop(
            lambda t, *_: t < steps, body, (0, carries, arrays), maximum_iterations=steps
        )
        stacks = self._stacked(arrays, xs)
        outputs, products = [each[0] for each in stacks], [each[1] for each in stacks]
        return outputs, products, [each[2:] for each in stacks], ends

    def _backward(
        self,
        xs: Parts,
        kernels: Parts,
        biases: Parts,
        products: Parts,
        before: list[Parts],
        of_outputs: Parts,
        of_ends: list[Carry],
    ) -> list:
        """Gradients of what `run` was given."""
        steps = tf.shape(xs[0])[0]
        arrays = self._arrays([[x, x] for x in xs], steps)

        def body(t: tf.Tensor, gradients: list, arrays: list) -> tuple:
            mask, own, of_wholes, written = self._mask_of(t), [], [], []
            for i, device in enumerate(self.devices):
                with tf.device(device):
                    states = [tf.gather(x, t) for x in before[i]]
                    x, r = tf.gather(xs[i], t), tf.gather(products[i], t)
                    carry = [*states, tf.zeros_like(states[0])]
                    with tf.GradientTape() as tape:
                        tape.watch([x, r, *carry])
                        after = self._step(x, r, carry, mask)
                    *of_carry, of_output = gradients[i]
                    of_output = of_output + tf.gather(of_outputs[i], t)
                    of_x, of_r, *of_states = tape.gradient(
                        after,
                        [x, r, *carry],
                        [*of_carry, of_output],
                        unconnected_gradients=tf.UnconnectedGradients.ZERO,
                    )
                    of_wholes.append(
                        cut_apart(self._gradient_of_h(of_r, kernels[i]), Rows(1, self.sizes))
                    )
                    written.append(
                        [a.write(t, v) for a, v in zip(arrays[i], (of_x, of_r), strict=True)]
                    )
                own.append(of_states)
            for i, device in enumerate(self.devices):
                with tf.device(device):
                    own[i][0] = sum_in_order([own[i][0], *(each[i] for each in of_wholes)])
                    own[i] = [_as(x, old) for x, old in zip(own[i], gradients[i], strict=True)]
            return t - 1, own, written

        _, of_begin, arrays = tf.while_loop(
            lambda t, *_: t >= 0, body, (steps - 1, of_ends, arrays), maximum_iterations=steps
        )
        stacks = self._stacked(arrays, xs)
        of_xs, of_products = [each[0] for each in stacks], [each[1] for each in stacks]
        of_kernels, of_biases = self._gradients_of_weights(kernels, biases, before, of_products)
        of_states = [each[:-1] for each in of_begin]
        return [*of_xs, *of_kernels, *of_biases, *_flat(of_states)]

    def _gradients_of_weights(
        self, kernels: Parts, biases: Parts, before: list[Parts], of_products: Parts
    ) -> tuple[Parts, Parts]:
        of_kernels, of_biases = [], []
        for i, device in enumerate(self.devices):
            with tf.device(device):
                h = tf.concat([states[0] for states in before], -1)
                with tf.GradientTape() as tape:
                    tape.watch([kernels[i], biases[i]])
                    product = self._product(h, kernels[i]) + biases[i]
                own = tape.gradient(product, [kernels[i], biases[i]], of_products[i])
            of_kernels.append(own[0])
            of_biases.append(own[1])
        return of_kernels, of_biases

    def _arrays(self, like: list[list[tf.Tensor]], steps: tf.Tensor) -> list[list]:
        """On each device an array of tensors for each of `like`, which tell dtype and last dim."""
        arrays = []
        for device, tensors in zip(self.devices, like, strict=True):
            with tf.device(device):
                shapes = [tf.TensorShape([None, x.shape[-1]]) for x in tensors]
                arrays.append(
                    [
                        tf.TensorArray(x.dtype, steps, element_shape=shape, clear_after_read=False)
                        for x, shape in zip(tensors, shapes, strict=True)
                    ]
                )
        return arrays

    def _stacked(self, arrays: list[list], xs: Parts) -> list[list[tf.Tensor]]:
        stacks = []
        for i, device in enumerate(self.devices):
            with tf.device(device):
                own = [array.stack() for array in arrays[i]]
                leading = xs[i].shape[:2]
                stacks.append([tf.ensure_shape(x, [*leading, x.shape[-1]]) for x in own])
        return stacks


def _as(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """With the static shape of `other`, as loops ask."""
    return tf.ensure_shape(tensor, other.shape)


def _flat(carries: list[Carry]) -> list[tf.Tensor]:
    return [x for carry in carries for x in carry]


def _of_devices(tensors: Sequence[tf.Tensor], count: int) -> list[list[tf.Tensor]]:
    size = len(tensors) // count
    return [list(tensors[i * size : (i + 1) * size]) for i in range(count)]
