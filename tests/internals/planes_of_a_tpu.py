"""A profile of a TPU as it is documented, written by hand: there is no TPU to write one."""

from tensorflow.tsl.profiler.protobuf import xplane_pb2

BEGAN_NS = 1_700_000_000_000_000_000
_MS_IN_PS = 10**9


class Plane:
    """Writes a plane as TensorFlow's profiler does: names and stats are kept once, and numbered."""

    def __init__(self, space, name):
        self.proto = space.planes.add(name=name)

    def stat(self, name, value):
        stat = xplane_pb2.XStat(metadata_id=self._number(self.proto.stat_metadata, name))
        if isinstance(value, str):
            stat.ref_value = self._number(self.proto.stat_metadata, value)
        else:
            stat.uint64_value = value
        return stat

    def line(self, name, events, timestamp_ns=0):
        """`events`: name, begin and end in ms, stats of the instruction, stats of this time."""
        line = self.proto.lines.add(name=name, timestamp_ns=timestamp_ns)
        for full_name, begin, end, of_instruction, of_event in events:
            number = self._number(self.proto.event_metadata, full_name)
            metadata = self.proto.event_metadata[number]
            if full_name.startswith("%"):  # the text of the instruction
                metadata.display_name = full_name.partition(" ")[0].lstrip("%")
            metadata.stats.extend(self.stat(*each) for each in of_instruction.items())
            line.events.add(
                metadata_id=number,
                offset_ps=int(begin * _MS_IN_PS),
                duration_ps=int((end - begin) * _MS_IN_PS),
                stats=[self.stat(*each) for each in of_event.items()],
            )

    def _number(self, table, name):
        for number, each in table.items():
            if each.name == name:
                return number
        number = len(table) + 1
        table[number].id, table[number].name = number, name
        return number


def space_of_two_cores():
    """Two cores of a TPU, a millisecond apart; a SparseCore; what is no instruction beside."""
    space = xplane_pb2.XSpace()
    environment = Plane(space, "Task Environment")
    for name, value in (("profile_start_time", BEGAN_NS), ("profile_stop_time", BEGAN_NS + 10**8)):
        environment.proto.stats.append(environment.stat(name, value))
    for core in (0, 1):
        plane = Plane(space, f"/device:TPU:{core}")
        plane.line("Steps", [("7", 0, 12, {}, {})])
        plane.line("XLA Modules", [("jit_step(42)", 0, 11, {}, {"run_id": 1})])
        plane.line(
            "XLA Ops",
            [
                ("%infeed.1 = (f32[8]) infeed()", 0, 1, {"hlo_category": "infeed"}, {}),
                (
                    "%fusion.2 = f32[8]{0:T(128)} fusion(...)",
                    1,
                    4,
                    {"hlo_category": "convolution fusion", "tf_op": "dense/MatMul:MatMul"},
                    {},
                ),
                ("%while.5 = (f32[8]) while(...)", 4, 7, {"hlo_category": "while"}, {}),
                (
                    "%fusion.6 = f32[8] fusion(...)",
                    4.5,
                    6.5,
                    {"hlo_category": "loop fusion", "tf_op": "while/body/Tanh:Tanh"},
                    {},
                ),
                (
                    "%all-reduce.3 = f32[8] all-reduce(...)",
                    7,
                    9,
                    {"hlo_category": "all-reduce"},
                    {},
                ),
                (
                    "%fusion.9 = f32[8] fusion(...)",
                    9,
                    11,
                    {"hlo_category": "loop fusion", "tf_op": "adam/Mul_3:Mul"},
                    {},
                ),
            ],
            timestamp_ns=core * 10**6,
        )
        plane.line(
            "Async XLA Ops",
            [
                ("%all-gather-start.4 = ...", 1, 1.1, {"hlo_category": "async-start"}, {"flow": 3}),
                ("%all-gather-done.4 = ...", 3, 3.5, {"hlo_category": "async-done"}, {"flow": 3}),
                ("%copy-start.8 = ...", 5, 6, {"hlo_category": "copy-start"}, {}),
            ],
            timestamp_ns=core * 10**6,
        )
    sparse = Plane(space, "/device:TPU:0 SparseCore 1")
    sparse.line("Sparse Core Ops", [("%gather.1 = ...", 2, 3, {"hlo_category": "gather"}, {})])
    Plane(space, "/device:TPU:0#Chip").line("XLA Ops", [("%none = ...", 0, 1, {}, {})])
    return space
