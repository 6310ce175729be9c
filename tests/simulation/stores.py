"""Jobs that save into one folder of an object store, whose requests come late, or lose answers.

There are neither renames nor locks there: marks, manifests and what the newest claim accepts say
what counts.
"""

from tests.simulation.backups import drawn_jobs, start_jobs
from tests.simulation.choices import Choices
from tests.simulation.faults import Faults
from tests.simulation.fit import Truth
from tests.simulation.object_store import SimulatedStore, StoreClient
from tests.simulation.world import Process, World
from tfparallel.callbacks.backup.backup_names import Draft, numbered
from tfparallel.callbacks.backup.lease import Claim
from tfparallel.callbacks.backup.remote_files import RemoteFiles
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage

URL = "sim://bucket/run"
_OF_PARTS = (".safetensors", "shared.json", "worker-0.json")


def run(choices: Choices) -> World:
    """A schedule; see `StoreTruth` for what is checked all the time."""
    world = World(choices)
    store = SimulatedStore(
        world,
        error_chance=(0.0, 0.0, 0.005)[choices.below(3)],
        late_chance=(0.0, 0.02, 0.1)[choices.below(3)],
        silence_chance=(0.0, 0.02)[choices.below(2)],
        is_strict=bool(choices.below(2)),
    )
    truth = StoreTruth(world, store)
    start_jobs(world, truth, drawn_jobs(choices), Faults(power=0.0))
    world.run()
    return world


class StoreTruth(Truth):
    """`Truth` of a store: looks at what counts after each change.

    Args:
        world, store: where.
    """

    def __init__(self, world: World, store: SimulatedStore):
        self.store = store
        super().__init__(world, store)  # type: ignore[arg-type]
        self._counted: dict[tuple[int, str], int | None] = {}  # steps of those that are certain
        self._newest_fence = 0
        store.changed = self._look

    def storage_of(self, process: Process) -> Storage:
        return Storage(URL, store=StoreClient(self.store, process), sleep=self.world.sleep)

    def numbers(self) -> list[int]:
        return self._seen_storage().numbers()

    def _seen_storage(self) -> Storage:
        return Storage(URL, store=StoreClient(self.store, None))

    def _names(self) -> list[str]:
        below = URL + "/"
        keys = [key.removeprefix(below) for key in self.store.objects]
        return sorted({key.split("/")[0] for key in keys})

    def _look(self, path: str) -> None:
        if path.endswith(_OF_PARTS):
            return  # what counts is said by other objects
        fences = numbered(self._names(), "lease")
        if max(fences, default=0) < self._newest_fence:  # all begins anew, whatever comes late
            self.newest_owner, self.published = (0, ""), {}
        self._newest_fence = max(fences, default=0)
        files = self._seen_storage().files
        assert isinstance(files, RemoteFiles)
        counting = {draft.published for draft in files.accepted()}
        for each in self._counted.keys() - counting:
            self._counts_no_more(*each)
        for each in sorted(counting - self._counted.keys()):
            self._counted[each] = self._begins_to_count(Draft(*each))
        self.certain = {n: steps for (n, _), steps in self._counted.items() if steps is not None}

    def _begins_to_count(self, draft: Draft) -> int | None:
        """Its last mark was removed."""
        if draft.number in self.published:
            self._violated(f"number {draft.number} is used twice")
        if draft.number <= max(self.published, default=0):
            self._violated(f"number {draft.number} comes after {max(self.published)}")
        try:
            steps = self.steps_of(draft.number)
        except InvalidBackupError as error:
            self._violated(f"{draft} counts and is not whole: {error}")
        self.published[draft.number] = draft.token
        return steps if self._token_of(self._newest_fence) == draft.token else None

    def _counts_no_more(self, number: int, token: str) -> None:
        """It is being deleted; one that was published while another took the folder may go."""
        steps = self._counted.pop((number, token))
        if steps is not None and not self._is_leaving:
            newer = [n for n in self.numbers() if n > number]
            if not any(self._is_whole(n) for n in newer):
                self._violated(f"backup {number} counts no more, and none that is newer is whole")

    def _token_of(self, fence: int) -> str:
        path = f"{URL}/lease-{fence:08d}"
        claim = Claim.from_bytes(fence, self.store.objects.get(path, b""))
        return "" if claim is None else claim.token
