"""A schedule: what a pipeline is given to carry out."""

from dataclasses import dataclass

from tfparallel.pipeline.plans.orders import Orders
from tfparallel.pipeline.plans.table import draw_table


@dataclass(frozen=True)
class Schedule(Orders):
    """For every device of a pipeline, its actions in order.

    A schedule says nothing of time: a device starts its next action as soon as it is done with
    the one before and has what the action depends on.

    A schedule of one's own is a list of orders, checked by `validate`:

        Schedule("mine", [
            [(0, 0, "forward"), (0, 0, "backward")],  # device 0
            [(1, 0, "forward"), (1, 0, "backward")],  # device 1
        ])

    Attributes:
        name: what messages call it.
        orders: one sequence of actions (or of plain `(stage, microbatch, kind)`) per device.
    """

    def all_forward_first(self) -> "Schedule":
        """The same with every device's forward passes before its backward passes, as in GPipe.

        Its devices keep what every microbatch needs for the way back, all at once.
        """
        orders = [
            sorted(order, key=lambda action: action.kind != "forward") for order in self.orders
        ]
        return Schedule(f"{self.name}, all forward passes first", orders)

    def table(self, **slots: int) -> str:
        """Draw the schedule as text, device by time slot; for `slots`, see `draw_table`."""
        return draw_table(self, **slots)
