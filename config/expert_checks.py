"""Checks the options of models with experts; validation.py calls `check` for such a model.

Each check raises UserError with a sentence that shows the values that do not go together. Read
schema.py, which has the options, before this file.
"""

from config.errors import UserError
from config.schema import Layout, ModelShape, Training


def check(model: ModelShape, layout: Layout | None, training: Training | None) -> None:
    """Raise UserError if the options of experts do not go together.

    layout, training: the options of these groups; None where a caller has only the model, or the
    model and the layout. The checks that need these options are then left out.
    """
    check_router(model)
    if layout is not None:
        check_ranks(model, layout)
    if layout is not None and training is not None:
        check_run(model)


def check_router(model: ModelShape) -> None:
    """Raise UserError if no block has experts, or if the router cannot choose among them.

    The router divides the experts into `router_groups` groups, takes the `router_groups_per_token`
    best groups for a token, and chooses the token's experts in these.
    """
    if not any(map(model.has_experts, range(model.layers))):
        dense = model.first_dense_layers
        interval = model.expert_interval
        raise UserError(
            f"first_dense_layers({dense}) and expert_interval({interval}) leave no block of "
            f"layers({model.layers}) with experts"
        )
    experts = model.experts
    chosen = model.experts_per_token
    groups = model.router_groups
    if chosen > experts:
        raise UserError(f"experts-per-token({chosen}) is more than experts({experts})")
    if experts % groups:
        raise UserError(f"router_groups({groups}) does not divide experts({experts})")
    best = model.router_groups_per_token
    if best > groups:
        raise UserError(f"router_groups_per_token({best}) is more than router_groups({groups})")
    if chosen > best * (experts // groups):
        within = f"{best} groups of {experts // groups} experts"
        raise UserError(f"experts-per-token({chosen}) is more than there are in {within}")
    if model.shared_gate and not model.shared_ffn_hidden:
        raise UserError("shared_gate is of the shared MLP: give shared_ffn_hidden too")


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
    widths = {"shared_ffn_hidden": model.shared_ffn_hidden}
    if not all(map(model.has_experts, range(model.layers))):
        widths["ffn-hidden"] = model.ffn_hidden
    for name, width in widths.items():
        if width % layout.tp:
            raise UserError(f"tp({layout.tp}) does not divide {name}({width})")


def check_run(model: ModelShape) -> None:
    """Raise UserError if a model with experts can be planned but not trained.

    Called when all options of a run are known. A model and a layout alone are not refused for this.
    """
    if model.bias:
        raise UserError(
            f"experts({model.experts}) have no biases here: give --no-bias, or leave --bias out"
        )
    if model.router_normalised and model.experts_per_token == 1:
        raise UserError(
            "experts-per-token(1) with router_normalised: the weight of a token's only expert is "
            "always 1, so that the router learns nothing; give --experts-per-token 2, or "
            "router_normalised = false for top-1 routing"
        )
