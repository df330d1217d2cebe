"""Scaling laws: the best tokens, batch and rate of a dense model, and its loss.

    law = LAWS["chinchilla"]
    law.tokens(7e9)                      # tokens for which 7B parameters are the best
    law.loss(7e9, 140e9, layers=32)      # nats a token, on the data of the law's own runs
    BATCH_LAWS[0].tokens(7e9, 140e9)     # of a step
    RATE_LAW.rate(7e9, 140e9)            # of AdamW

A law says which loss N parameters reach with D tokens: E + A / N^alpha + B / D^beta, and perhaps
C / layers^gamma. Of all N and D with the same FLOPs, about 6 N D, the loss is the lowest where
alpha A / N^alpha = beta B / D^beta.
"""

from typing import NamedTuple


class Law(NamedTuple):
    """A law with its constants and their source.

    ratio: tokens for each parameter, if they are stated in place of the optimum of the loss; else
    None. least, most: the parameters of the smallest and of the largest model among the runs of the
    law.
    """

    name: str
    source: str
    e: float
    a: float
    alpha: float
    b: float
    beta: float
    c: float = 0.0
    gamma: float = 0.0
    ratio: float | None = None
    least: float = 0.0
    most: float = 0.0

    def tokens(self, parameters: float) -> float:
        """Return the tokens for which a number of parameters is the best."""
        if self.ratio is not None:
            return self.ratio * parameters
        falls = self.beta * self.b / (self.alpha * self.a)
        return float((falls * parameters**self.alpha) ** (1 / self.beta))

    def loss(self, parameters: float, tokens: float, layers: int) -> float:
        """Return the loss in nats a token, on data like the law's own."""
        by_size = self.a / parameters**self.alpha + self.b / tokens**self.beta
        return float(self.e + by_size + self.c / layers**self.gamma)


LAWS = {
    law.name: law
    for law in (
        # The third approach of that paper contradicts its other two; its losses here are those of a
        # fit that was repeated on the same runs.
        Law(
            name="chinchilla",
            source="arXiv 2203.15556, table 3: 20 tokens a parameter; loss by arXiv 2404.10102",
            e=1.8172,
            a=482.01,
            alpha=0.3478,
            b=2085.43,
            beta=0.3658,
            ratio=20.0,
            least=44e6,
            most=16e9,
        ),
        # Fitted by benchmarks/planner/loss_rows.py, each model held out: 0.6 % off in the mean.
        Law(
            name="gemstones",
            source="fitted on the 22 models of arXiv 2502.06857: benchmarks/results/loss_rows.md",
            e=2.0318,
            a=249.16,
            alpha=0.2991,
            b=1.2995e5,
            beta=0.54881,
            c=0.76377,
            gamma=1.1702,
            least=48e6,
            most=2.1e9,
        ),
    )
}


class BatchLaw(NamedTuple):
    """A law of the tokens in a step: factor x (of)^power.

    of: what it goes by: FLOPs (6 N D), tokens D, or the loss at the end.
    """

    name: str
    of: str
    factor: float
    power: float

    def tokens(self, parameters: float, tokens: float, loss: float = 1.0) -> float:
        """Return the tokens of a step of a run with so many parameters and tokens, and this loss.

        loss: in nats a token, for a law that goes by it.
        """
        by = {"FLOPs": 6.0 * parameters * tokens, "tokens": tokens, "loss": loss}[self.of]
        return float(self.factor * by**self.power)


# The first is the one that `plan.py budget` takes. The second is of the best batch too; the third
# is the critical batch, beyond which more samples in a step save few steps.
BATCH_LAWS = (
    BatchLaw("arXiv 2401.02954", "FLOPs", 0.2920, 0.3271),
    BatchLaw("arXiv 2503.04715", "tokens", 0.58, 0.571),
    BatchLaw("critical by arXiv 2001.08361", "loss", 2e8, -1 / 0.21),
)


class RateLaw(NamedTuple):
    """A law of AdamW's best peak rate: factor x N^size x D^data, N without the embeddings.

    least: the parameters of the smallest of its runs.
    """

    source: str
    least: float
    factor: float
    size: float
    data: float

    def rate(self, parameters: float, tokens: float) -> float:
        """Return the rate for so many parameters, without embeddings, and tokens."""
        return float(self.factor * parameters**self.size * tokens**self.data)


RATE_LAW = RateLaw("arXiv 2503.04715", 60e6, 1.79, -0.713, 0.307)
