"""Checks the options of models with experts; validation.py calls `check` for such a model.

Each check raises UserError with a sentence that shows the values that do not go together. Read
schema.py, which has the options, before this file.
"""

from config.messages import UserError
from config.schema import Layout, ModelShape, Training


def check(model: ModelShape, layout: Layout | None, training: Training | None) -> None:
    """Raise UserError if the options of experts do not go together.

    layout, training: the options of these groups; None where a caller has only the model, or the
    model and the layout. The checks that need these options are then left out.
    """
    check_router(model)
    if layout is not None:
        check_ranks(model, layout)


def check_router(model: ModelShape) -> None:
    """Raise UserError if no block has experts, or if the router cannot choose among them.

    The router divides the experts into `router_groups` groups, takes the `router_groups_per_token`
    best groups for a token, and chooses the token's experts in these.
    """
    if not any(map(model.has_experts, range(model.layers))):
        dense = model.first_dense_layers
        interval = model.expert_interval
        raise UserError(
            f"first-dense-layers({dense}) and expert-interval({interval}) leave no block of "
            f"layers({model.layers}) with experts"
        )
    experts = model.experts
    chosen = model.experts_per_token
    groups = model.router_groups
    if chosen > experts:
        raise UserError(f"experts-per-token({chosen}) is more than experts({experts})")
    if experts % groups:
        raise UserError(f"router-groups({groups}) does not divide experts({experts})")
    best = model.router_groups_per_token
    if best > groups:
        raise UserError(f"router-groups-per-token({best}) is more than router-groups({groups})")
    if chosen > best * (experts // groups):
        within = f"{best} groups of {experts // groups} experts"
        raise UserError(f"experts-per-token({chosen}) is more than there are in {within}")
    if model.shared_gate and not model.shared_ffn_hidden:
        raise UserError("--shared-gate is of the shared MLP: give --shared-ffn-hidden N too")


def check_ranks(model: ModelShape, layout: Layout) -> None:
    """Raise UserError if the ranks of a stage cannot divide the experts, or tp the other MLPs."""
    ep = layout.ep or 1
    ranks = (layout.dp or 1) * layout.cp * layout.tp
    if model.experts % ep:
        raise UserError(f"ep({ep}) does not divide experts({model.experts})")
    if layout.dp is not None and ranks % ep:
        axes = f"dp({layout.dp}) * cp({layout.cp}) * tp({layout.tp}) = {ranks}"
        raise UserError(f"ep({ep}) does not divide the ranks of a stage: {axes}")
    # tp does not cut experts. It cuts the MLP that all tokens share and MLPs in place of experts.
    widths = {"shared-ffn-hidden": model.shared_ffn_hidden}
    if not all(map(model.has_experts, range(model.layers))):
        widths["ffn-hidden"] = model.ffn_hidden
    for name, width in widths.items():
        if width % layout.tp:
            raise UserError(f"tp({layout.tp}) does not divide {name}({width})")
