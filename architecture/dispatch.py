"""How often a token is sent to the nodes of its experts: once for each expert, or once to a node.

    rows_elsewhere(8, 4)                 6.0 rows of a token go to other nodes, one for each expert
    copies_elsewhere(TopK(128, 8), 4)    2.72 of them, if each node gets one copy
    sends_once(model, 4)                 whether a run with experts on 4 nodes sends one copy

The expected numbers are those of a router that chooses every expert equally often and independently
of the others, as a balanced one does on average. Experts are divided over the nodes in their order,
equally many on each. `distributed/mesh.py` and the planner ask `sends_once`, so that a plan is that
of the run.
"""

from functools import lru_cache
from math import comb
from typing import NamedTuple

from architecture.shape import ModelShape

# One copy to a node is sent where it spares at least this share of a token's rows. Inside the node
# each of the k rows is then sent again, over links that are about nine times as fast as a GPU's
# share of the network, and three more small all-to-alls are waited for: a share of about 0.1 pays
# for that (benchmarks/results/dispatch.md).
LEAST_SPARED = 0.2


class TopK(NamedTuple):
    """What a router chooses for a token: k of the experts, in groups_per_token of their groups."""

    experts: int
    k: int
    groups: int = 1
    groups_per_token: int = 1


def top_k_of(model: ModelShape) -> TopK:
    """Return what the router of a model with experts chooses for a token."""
    groups = model.router_groups
    groups_per_token = model.router_groups_per_token if groups > 1 else 1
    return TopK(model.experts, model.experts_per_token, groups, groups_per_token)


@lru_cache(maxsize=4096)
def nodes_of_token(top_k: TopK, nodes: int) -> float:
    """Return the expected number of nodes that have any of a token's experts.

    Without groups a node has none with the probability C(E - m, k) / C(E, k) for its m of the E
    experts. With groups it is the mean of that over the chosen groups: what a node has of these is
    counted. nodes: divides the number of experts.
    """
    of_node = top_k.experts // nodes
    size = top_k.experts // top_k.groups  # of a group
    pool = size * top_k.groups_per_token  # the experts of the chosen groups
    missed = 0.0  # the expected number of nodes without any
    for node in range(nodes):
        # How many ways there are to choose so many groups that have so many experts of this node.
        ways = {(0, 0): 1}
        for group in range(top_k.groups):
            start = max(node * of_node, group * size)
            common = max(0, min((node + 1) * of_node, (group + 1) * size) - start)
            for (groups, here), number in list(ways.items()):
                key = groups + 1, here + common
                ways[key] = ways.get(key, 0) + number
        for (groups, here), number in ways.items():
            if groups == top_k.groups_per_token:
                missed += number * comb(pool - here, top_k.k)
    return nodes - missed / (comb(top_k.groups, top_k.groups_per_token) * comb(pool, top_k.k))


def rows_elsewhere(k: int, nodes: int) -> float:
    """Return the expected rows that a token sends to other nodes, if each expert gets its own."""
    return k * (nodes - 1) / nodes


def copies_elsewhere(top_k: TopK, nodes: int) -> float:
    """Return the expected rows that a token sends to other nodes, if each node gets one copy.

    The token is on any of the nodes, so that one in N of its nodes is its own.
    """
    return nodes_of_token(top_k, nodes) * (nodes - 1) / nodes


def sends_once(model: ModelShape, nodes: int) -> bool:
    """Return whether ranks that divide experts over `nodes` nodes send a token once to a node.

    They do where it spares at least LEAST_SPARED of a token's rows. The ranks of these nodes are
    equally many on each, in the order of the nodes.
    """
    if nodes == 1:
        return False
    top_k = top_k_of(model)
    spared = rows_elsewhere(top_k.k, nodes) - copies_elsewhere(top_k, nodes)
    return spared >= LEAST_SPARED * top_k.k
