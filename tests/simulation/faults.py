"""What goes wrong in a simulated world, drawn before each request of a process."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.world import Process, World

STOP_S = (0.05, 0.5, 3.0, 20.0)
JUMP_S = (0.5, 5.0, 60.0)


@dataclass(frozen=True)
class Faults:
    """How often each happens, for each request.

    Attributes:
        kill: a process, as by `kill -9`.
        stop: a process, for one of `STOP_S`.
        jump: the clock of a process goes forward by one of `JUMP_S`.
        power: the disk loses what was not synced, and all processes of its machine die.
        most: how many there may be in all.
    """

    kill: float = 0.002
    stop: float = 0.002
    jump: float = 0.001
    power: float = 0.0005
    most: int = 6


class FaultInjector:
    """Lets things go wrong.

    Args:
        world: where.
        faults: how often.
        victims: whom it may happen to.
        power_fails: what a power failure does.

    Attributes:
        left: how many may still happen.
    """

    def __init__(
        self,
        world: World,
        faults: Faults,
        victims: Callable[[Process], bool],
        power_fails: Callable[[], None] = lambda: None,
    ):
        self._world, self._victims, self._power_fails = world, victims, power_fails
        self._chances = [faults.kill, faults.stop, faults.jump, faults.power]
        self._any = sum(self._chances)
        self.left = faults.most
        world.before_request = self.before

    def before(self, process: Process) -> None:
        """Draws whether anything happens to `process` now, and what."""
        choices = self._world.choices
        if not self.left or not self._victims(process) or not choices.rarely(self._any):
            return
        self.left -= 1
        drawn = choices.below(1000) / 1000 * self._any
        kind = 0
        while kind < 3 and drawn >= self._chances[kind]:
            drawn -= self._chances[kind]
            kind += 1
        if kind == 0:
            self._world.note("killed")
            self._world.kill(process)
        elif kind == 1:
            seconds = STOP_S[choices.below(len(STOP_S))]
            self._world.note(f"stopped for {seconds} s")
            self._world.stop(process, seconds)
        elif kind == 2:
            process.clock_s += JUMP_S[choices.below(len(JUMP_S))]
            self._world.note(f"its clock is {process.clock_s} s ahead")
        else:
            self._world.note("power failure")
            self._power_fails()
            for each in self._world.processes:
                if self._victims(each) and each is not process:
                    self._world.end(each)
            self._world.kill(process)
