"""The mesh of ranks: named axes, and this rank's groups along them.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp         (upper case: the size of an axis)

Neighbouring ranks form a tensor group, which normally lies on one node. The next axis is cp: its
ranks have the same samples and different tokens. pp is the slowest axis, so a pipeline crosses
nodes. The Mesh is passed as an argument to all code that communicates. `Mesh()` is a mesh of one
rank and needs no process group.

A role is the name of a kind of group, such as tp. All groups of a role are given as rows: the ranks
of each group. With pp = 2, dp = 1, tp = 2 the rows of tp are (0, 1), (2, 3), the rows of pp are
(0, 2), (1, 3): the pipelines. Each group of cp is divided twice: cp = (0, 1, 2, 3) has the heads
(0, 1), (2, 3), which are n = 2 neighbours, and the kv (0, 2), (1, 3), the ranks with the same place
in their heads.

A group of experts whose ranks are on several nodes, equally many on each, is divided likewise if a
token is sent once to a node (node_dispatch.py): experts = (0, 1, 2, 3) on two nodes has within the
nodes (0, 1), (2, 3), and across them (0, 2), (1, 3), the ranks with the same place on their node.
"""

from collections.abc import Callable, Mapping
from functools import partial

from architecture import dispatch
from config.mesh_axes import AXES, coordinates, rows_along
from config.schema import Config
from distributed.collectives import Group
from distributed.context import Context
from distributed.placement import nodes_sent_once
from schedules.partition import placement
from watchdog.flight_recorder import FlightRecorder

# The attributes of Mesh that are groups; the pre-flight tries them in this order. In a layout that
# does not need one of them it is another group or this rank alone.
ROLES = (
    *("tp", "cp", "dp", "replicas", "heads", "kv", "kv_copies", "key_copies"),
    *("experts", "experts_across", "experts_within", "expert_replicas", "stage"),
    *("forward", "backward", "tied", "world"),
)


class Mesh:
    """The pp x dp x cp x tp grid of ranks and this rank's groups on it.

    axes: the number of ranks along each axis. place: this rank's position on each axis. tp, cp,
    dp: the groups along these axes. replicas: the ranks that hold the same parameters and see
    different tokens (dp and cp together). heads: the ranks of cp among which the attention heads
    are divided. kv: the ranks of cp that hold the same heads and gather their keys and values.
    kv_copies: the neighbouring ranks of tp that hold the same key/value head, if tp is a multiple
    of the number of heads; else this rank alone. key_copies: the same of the key heads of a mixer.
    experts: the neighbouring ranks of dp x cp x tp among which a block's experts are divided, and
    expert_replicas: the ranks that hold the same experts and see different tokens.
    experts_across, experts_within: the ranks of `experts` with the same place on their nodes, in
    the order of the nodes, and those on this rank's node, if a token is sent once to a node; then
    nothing is sent over `experts`. If not, each of the two is this rank alone.
    stage: all ranks with the same stages, numbered as (replicas.rank, tp.rank); only for Muon.
    forward (also named pp) and backward: the ranks of this pipeline, as one group for activations
    and another for their gradients, so that the two never wait for one another on a GPU stream.
    tied: the first and the last rank of this pipeline. world: all ranks. recorder: records what
    this rank does and the operations of its groups.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        context: Context | None = None,
        over_heads: int = 1,
        ep: int = 0,
        tied: bool = True,
        whole_stages: bool = False,
        sends_once: Callable[[int], bool] = lambda nodes: False,
        kv_copies: int = 1,
        key_copies: int = 1,
    ):
        """Make the groups, in one fixed order; collective over all ranks if there is a context.

        axes: the number of ranks along each axis; None means 1 for each. over_heads: the number of
        neighbouring ranks of cp that form `heads`.
        ep: the number of ranks in `experts`; 0: the model has no experts. tied: whether the first
        and the last rank of a pipeline have copies of one matrix; if not, no group is made of them.
        whole_stages: whether all ranks of a stage need a group (`stage`).
        sends_once: whether a group of experts on so many nodes sends a token once to each of them.
        kv_copies, key_copies: the number of tensor ranks with the same key/value head of attention,
        and with the same key head of a mixer.
        Raise ValueError if the product of the axes is not the number of ranks.
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

        # The groups of every role are made in this order on all ranks.
        self._context = context
        self._make_groups_in_stages(over_heads)
        self.kv_copies = self._copies(kv_copies, "kv copies")
        self.key_copies = self.kv_copies
        if key_copies != kv_copies:
            self.key_copies = self._copies(key_copies, "key copies")
        self._make_groups_of_experts(ep, sends_once)
        self.stage = self.replicas
        if whole_stages and self.tp.size > 1:
            self.stage = self.tp
            if self.replicas.size > 1:
                self.stage = self._along("stage", "dp", "cp", "tp")
        self._make_groups_of_pipelines(tied)
        self.world = self._own_group(rows, "world")

    def _own_group(self, rows: list[tuple[int, ...]], role: str) -> Group:
        """Make all groups of a role; return the one with this rank. rows: the ranks of each."""
        if self._context is None:
            return Group((self.rank,))
        return self._context.group(rows, role)

    def _along(self, role: str, *names: str) -> Group:
        """Make all groups of a role along the named axes; return the one with this rank."""
        return self._own_group(rows_along(self.axes, names), role)

    def _make_groups_in_stages(self, over_heads: int) -> None:
        """Make the groups along tp, cp and dp, and those of attention over cp."""
        self.tp = self._along("tp", "tp")
        self.cp = self._along("cp", "cp")
        self.dp = self._along("dp", "dp")
        self.replicas = self.dp
        if self.cp.size > 1:
            self.replicas = self._along("replicas", "dp", "cp")
        self.heads = Group((self.rank,))
        self.kv = self.cp
        if over_heads > 1:
            rows_of_cp = rows_along(self.axes, ("cp",))
            self.heads = self._own_group(_neighbours(rows_of_cp, over_heads), "heads")
            self.kv = self._own_group(_same_places(rows_of_cp, over_heads), "kv")

    def _copies(self, count: int, role: str) -> Group:
        """Return the group of the `count` neighbouring tensor ranks that hold the same head."""
        if count == 1:
            return Group((self.rank,))
        if count == self.tp.size:
            return self.tp
        rows_of_tp = rows_along(self.axes, ("tp",))
        return self._own_group(_neighbours(rows_of_tp, count), role)

    def _make_groups_of_experts(self, ep: int, sends_once: Callable[[int], bool]) -> None:
        """Make the groups among which experts are divided; the arguments are those of Mesh."""
        alone = Group((self.rank,))
        self.experts = self.experts_across = self.experts_within = alone
        self.expert_replicas = self.replicas
        # tp shards no expert, so its ranks are replicas too: the groups differ even with ep = 1.
        if not ep or (ep == 1 and self.tp.size == 1):
            return
        rows_of_stages = rows_along(self.axes, ("dp", "cp", "tp"))  # a row for each value of pp
        rows = _neighbours(rows_of_stages, ep)
        own = next(row for row in rows if self.rank in row)
        nodes_of_rows = self._rows_sent_once(rows, sends_once)
        if own in nodes_of_rows:  # nothing is sent over the whole group: it needs no communicator
            self.experts = Group(own, own.index(self.rank))
        rows_sent_often = [row for row in rows if row not in nodes_of_rows]
        if rows_sent_often:
            group = self._own_group(rows_sent_often, "experts")
            self.experts = self.experts if own in nodes_of_rows else group
        if nodes_of_rows:
            across = [row for nodes in nodes_of_rows.values() for row in zip(*nodes)]
            within = [row for nodes in nodes_of_rows.values() for row in nodes]
            self.experts_across = self._own_group(across, "experts across")
            self.experts_within = self._own_group(within, "experts within")
        replicas = _same_places(rows_of_stages, ep)
        self.expert_replicas = self._own_group(replicas, "expert replicas")

    def _rows_sent_once(
        self, rows: list[tuple[int, ...]], sends_once: Callable[[int], bool]
    ) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the groups of experts that send a token once to a node: for each its nodes' ranks.

        rows: the ranks of each group.
        """
        if self._context is None or len(rows[0]) == 1:
            return {}
        nodes = self._context.nodes
        of_nodes = {row: nodes_sent_once(row, nodes, sends_once) for row in rows}
        return {row: ranks for row, ranks in of_nodes.items() if ranks}

    def _make_groups_of_pipelines(self, tied: bool) -> None:
        """Make the groups of ranks that send each other messages; `tied` is that of Mesh.

        A communicator of NCCL takes some hundred MB, so there is none that nothing is sent over.
        """
        rows = rows_along(self.axes, ("pp",))
        self.forward = self._along("forward", "pp")  # messages of activations
        self.backward = self._along("backward", "pp")  # messages of their gradients
        self.pp = self.forward
        # The ranks with the embedding and the head, which have the same weights if they are tied.
        self.tied = Group((self.rank,))
        if tied:
            ends = [tuple(sorted({row[0], row[-1]})) for row in rows]
            self.tied = self._own_group(ends, "tied")

    def channel(self, kind: str) -> Group:
        """Return the group that carries the messages of a kind: F, activations, or B, gradients.

        NCCL runs the operations of a group on a rank one after the other, so a message that waits
        for its receiver delays all later messages of the same group on this rank. Also where ranks
        hold several stages, and so send up and down, no rank waits for ever: all ranks start their
        messages in one order (Schedule.turn).
        """
        return self.forward if kind == "F" else self.backward

    def group(self, role: str) -> Group:
        """Return the group with this name, such as tp: an attribute of the mesh.

        The spec of a parameter names groups, for example the group over which its gradient is
        reduced; code that has a name calls this.
        """
        return getattr(self, role)


def _neighbours(rows: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Cut each row into groups of `size` neighbours: (0, 1, 2, 3) into (0, 1) and (2, 3)."""
    groups = []
    for row in rows:
        groups += [row[start : start + size] for start in range(0, len(row), size)]
    return groups


def _same_places(rows: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Group the ranks with the same place in `_neighbours`: (0, 1, 2, 3) as (0, 2) and (1, 3)."""
    return [row[place::size] for row in rows for place in range(size)]


def mesh_of_run(config: Config, context: Context | None) -> Mesh:
    """Make the mesh of a run's layout with all groups that the layout needs.

    context: this rank's connections to the other ranks; None for a world of one rank. Collective
    over all ranks.
    """
    layout = config.layout
    expert_ranks = 0  # the mesh of a model without experts has no groups for them
    if config.model.experts > 1:
        expert_ranks = layout.ep or 1
    rank_of_stage = placement(layout)
    tied_over_ranks = config.model.copies_embedding and rank_of_stage[0] != rank_of_stage[-1]
    return Mesh(
        layout.axes,
        context,
        over_heads=layout.over_heads(config.model),
        ep=expert_ranks,
        tied=tied_over_ranks,
        whole_stages=config.training.optimizer == "muon",
        sends_once=partial(dispatch.sends_once, config.model),
        kv_copies=layout.kv_copies(config.model),
        key_copies=layout.key_copies(config.model),
    )
