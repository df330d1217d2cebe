"""The layouts that --audit-every can examine."""

from config.messages import UserError
from config.schema import Config


def check(config: Config) -> None:
    """Raise UserError if a run has no replicas to compare, or none that can repeat a micro-batch.

    dp is filled in.
    """
    layout = config.layout
    given = f"--audit-every {config.run.audit_every}"
    dp = layout.dp or 1
    if dp == 1:
        raise UserError(f"{given} compares data-parallel replicas, two or more: dp is {dp}")
    if layout.zero == 3:
        raise UserError(f"{given} needs whole replicas of the weights: --zero 0, 1 or 2, not 3")
    if layout.vocab_pp:
        raise UserError(f"{given} takes no --vocab-pp: its vocabulary passes are not repeated")
    if config.run.compile:
        raise UserError(f"{given} takes no --compile: it examines each product that torch starts")
    if config.run.routing_file:
        raise UserError(f"{given} takes no --record-routing and no --pin-routing")
    ep = layout.ep or 1
    if layout.tp * layout.cp % ep:
        raise UserError(
            f"{given}: a replica must have all experts, but ep({ep}) does not divide "
            f"tp({layout.tp}) * cp({layout.cp})"
        )
