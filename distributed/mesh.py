"""The mesh of ranks: named axes, and this rank's groups along them.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp

so a tensor group is a run of neighbouring ranks on one node, beside it the ranks that share its
samples (cp), and a pipeline crosses nodes. A Mesh is passed to all that need one; `Mesh()` is a
world of one that needs no process group.
"""

from collections.abc import Mapping

from config.schema import AXES, coordinates, rows_along
from distributed.collectives import Group
from distributed.context import Context
from watchdog.flight_recorder import FlightRecorder

# The groups of a mesh, in the order in which they are made.
ROLES = ("tp", "cp", "dp", "replicas", "forward", "backward", "tied", "world")
# Where a rank holds several stages, the groups of messages of one kind, by direction and sender.
CHANNELS = ("up from even", "up from odd", "down from even", "down from odd")


class Mesh:
    """The pp x dp x cp x tp grid of ranks and this rank's groups on it.

    axes: ranks along each axis; place: this rank's position on each. tp, cp, dp: the groups along
    these. replicas: ranks that hold the same parameters and see other tokens (dp and cp together).
    heads: ranks of cp that share attention's heads; kv: those that hold the same heads, whose keys
    and values are gathered.
    forward (also pp), backward: the ranks of this pipeline, once for activations and once for their
    gradients, so that the two never wait for one another on a GPU stream. tied: the first and the
    last of these. world: all. recorder: what this rank does, and the groups' operations.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        context: Context | None = None,
        channels: bool = False,
        vocabulary: bool = False,
        over_heads: int = 1,
    ):
        """Collective over all ranks when there is a context: groups are made in one fixed order.

        channels: whether ranks hold several stages, so that messages of one kind go both ways or
        round in a ring. vocabulary: whether the vocabulary is spread over pipeline ranks too: over
        the group `vocabulary` of pp and tp. over_heads: how many neighbours of cp are in `heads`.
        Raises ValueError if the axes do not multiply to the number of ranks.
        """
        self.axes = dict(axes or dict.fromkeys(AXES, 1))
        self.rank, self.size = (context.rank, context.size) if context else (0, 1)
        rows = rows_along(self.axes, AXES)
        if len(rows[0]) != self.size:
            raise ValueError(f"{self.axes} is not a mesh of {self.size} ranks")
        self.place = coordinates(self.rank, self.axes)
        self.recorder = context.recorder if context else FlightRecorder()
        shown = ("tp", "pp", "dp") if self.axes["cp"] == 1 else ("tp", "cp", "pp", "dp")
        self.recorder.coordinates = {name: self.place[name] for name in shown}

        def own_group(rows: list[tuple[int, ...]], role: str) -> Group:
            return context.group(rows, role) if context else Group((self.rank,))

        def along(role: str, *names: str) -> Group:
            return own_group(rows_along(self.axes, names), role)

        self.tp, self.cp, self.dp = along("tp", "tp"), along("cp", "cp"), along("dp", "dp")
        self.replicas = self.dp if self.cp.size == 1 else along("replicas", "dp", "cp")
        self.heads, self.kv = Group((self.rank,)), self.cp
        if over_heads > 1:
            shared = rows_along(self.axes, ("cp",))
            n, starts = over_heads, range(0, self.cp.size, over_heads)
            self.heads = own_group([row[i : i + n] for row in shared for i in starts], "heads")
            self.kv = own_group([row[i::n] for row in shared for i in range(n)], "kv")
        self.pp = self.forward = along("forward", "pp")
        self.backward = along("backward", "pp")
        self._channels = {"F": [self.forward] * 4, "B": [self.backward] * 4}
        if channels:
            for kind, role in (("F", "forward"), ("B", "backward")):
                self._channels[kind] = [along(f"{role} {name}", "pp") for name in CHANNELS]
        # A group for the collectives of each vocabulary pass: none waits for those of another.
        self.passes = {kind: along(f"vocabulary {kind}", "pp") for kind in "ESTG" * vocabulary}
        self.vocabulary = along("vocabulary", "pp", "tp") if vocabulary else self.tp
        pipelines = rows_along(self.axes, ("pp",))
        ends = [(row[0], row[-1]) if len(row) > 1 else row for row in pipelines]
        self.tied, self.world = own_group(ends, "tied"), own_group(rows, "world")

    def channel(self, kind: str, source: int, to: int) -> Group:
        """The group for messages of a kind, F or B, from one pipeline rank to a neighbour.

        NCCL runs a group's operations on a rank one after the other. So where ranks hold several
        stages, no rank both sends and receives in one of these groups, nor sends both ways: a
        message that waits for its receiver holds up only those behind it, to the same receiver.
        """
        return self._channels[kind][2 * (to < source) + source % 2]

    def group(self, role: str) -> Group:
        """The group of one of ROLES, as a parameter's spec names it."""
        return getattr(self, role)
