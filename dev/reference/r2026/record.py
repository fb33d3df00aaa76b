"""A record as tables: sizes, layers, parameters, stages. Everything else in this package reads them."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    model_dim: int = 768
    num_heads: int = 6
    mlp_dim: int = 3072
    vocab_size: int = 50257
    hidden: int = 64  # width of the coefficient generators
    bigram_rows: int = 377280  # 15 padded vocabularies / 2
    sign_rows: int = 8192
    micro_batches: int = 8
    qk_dim: int | None = None  # width of a head's q and k; None: as of v

    @property
    def head_dim(self):
        return self.model_dim // self.num_heads

    @property
    def qk_width(self):
        return self.qk_dim or self.head_dim

    @property
    def padded_vocab(self):
        return -(-self.vocab_size // 128) * 128


@dataclass(frozen=True)
class Layer:
    """attention: None, "plain" or "paired"; value_table: 0..4 or None. gates: the generator row ("a" or "b")
    of its coefficients.
    """

    attention: str | None = "plain"
    long_window: bool = False  # also: the key offset
    value_table: int | None = None
    gates: str = "a"
    xsa: bool = False
    output_gate: bool = False
    dc: bool = False
    from_late: bool = False  # attention reads the kept output of the late layer in place of the stream
    dynamic: bool = (
        False  # residual and output factors, V's and the stream's additions come from generator "mu"
    )


LAYERS = (
    Layer("paired"),
    Layer(value_table=0, xsa=True),
    Layer("paired", value_table=1),
    Layer(long_window=True, xsa=True, output_gate=True),
    Layer(gates="b", xsa=True),
    Layer("paired", gates="b"),
    Layer(None, gates="b"),
    Layer(gates="b", xsa=True),
    Layer(gates="b", value_table=2, from_late=True),
    Layer("paired", gates="b", value_table=3, from_late=True),
    Layer(
        gates="b", long_window=True, value_table=4, output_gate=True, dc=True, from_late=True, dynamic=True
    ),
)
SMEAR_CHANNELS, VALUE_GATE_CHANNELS = 12, 6
NUM_MU, NUM_NU = 14, 5


@dataclass(frozen=True)
class Record:
    """early, late: layers whose output is kept; the layer without attention adds the early one. The last
    layer is dynamic. wo_by_input: the rows of Wo in its bank are input channels. fp8: what of it is emulated
    where a run asks for the record's own: "mlp" forward only, "mlp-up" of that the first product only,
    "mlp-full" and "qkv" both ways. masked: the last validation leaves impossible tokens out.
    """

    sizes: Sizes = Sizes()
    layers: tuple = LAYERS
    early: int = 3
    late: int = 7
    dc_window: int = 112  # keys of the second softmax
    wo_by_input: bool = False
    fp8: tuple = ("head", "mlp")
    masked: bool = False
    schedule: "Schedule" = None  # of a training run

    def attention_layers(self):
        return [i for i, layer in enumerate(self.layers) if layer.attention]

    def columns(self, row):
        """({what: slice of a generator's coefficients}, their number), in the order in which the original
        lays them out.

        Keys: ("xsa", i), ("gate", i), ("x0", i), ("bigram", i), "skip", "dc1", "dc2". Generators mu and nu
        have plain numbers.
        """
        table, at, heads = {}, 0, self.sizes.num_heads

        def take(key, n):
            nonlocal at
            table[key] = slice(at, at + n)
            at += n

        mine = [i for i in self.attention_layers() if self.layers[i].gates == row]
        for key, has in (("xsa", "xsa"), ("gate", "output_gate")):
            for i in mine:
                if getattr(self.layers[i], has):
                    take((key, i), heads)
        for i in mine:
            if not self.layers[i].dynamic:
                take(("x0", i), 1)
                take(("bigram", i), 1)
        if row == "b":
            take("skip", 1)
            take("dc1", heads)
            take("dc2", heads)
        return table, at


# ---- parameters -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """storage: bf16, fp32, or split (fp32 whose bf16 part is a truncation). matrix_lr: a multiplier for each
    matrix of a bank.
    """

    shape: tuple
    storage: str
    optimizer: str
    lr: float = 1.0
    decay: float = 0.0
    betas: tuple = (0.9, 0.99)
    matrix_lr: tuple = ()


def parameters(r):
    """{name: Param} of a Record, under the original's names."""
    z, layers, att = r.sizes, len(r.layers), len(r.attention_layers())
    d, h, f, vp = z.model_dim, z.num_heads, z.mlp_dim, z.padded_vocab
    k = max(r.columns(row)[1] for row in "ab")
    table = (0.75, 0.95)
    return {
        "embed.weight": Param((vp, d), "bf16", "adam", 1, 150, (0.5, 0.95)),
        "lm_head.weight": Param((d, vp), "bf16", "adam", 1, 150, (0.5, 0.95)),
        "value_embeds": Param((5 * vp, d), "bf16", "adam", 75, 5, table),
        "bigram_embed.weight": Param((z.bigram_rows, d), "bf16", "adam", 75, 5, table),
        "qk_bank": Param((att * h, 2 * z.qk_width, d), "split", "normuon"),
        "vo_bank": Param((att * 2, d, d), "split", "normuon"),
        "mlp_bank": Param((layers + 1, 2, f, d), "split", "normuon", matrix_lr=(1.0, 2.0)),
        "ve_gate_bank": Param((5, h, 2 * VALUE_GATE_CHANNELS), "bf16", "adam", 1, 1),
        "smear_gate.weight": Param((1, SMEAR_CHANNELS), "bf16", "adam", 0.01),
        "scalars": Param((2 * layers + 2,), "fp32", "adam", 5),
        "resid_lambdas": Param((layers, 2), "fp32", "adam", 5, 0, (0.9, 0.95)),
        "post_lambdas": Param((layers, 2), "fp32", "adam", 1, 0, (0.9, 0.95)),
        "mudd_w1": Param((2, z.hidden, d), "bf16", "adam", 0.25, 1),
        "mudd_w2": Param((2, NUM_MU, z.hidden), "bf16", "adam", 0.25, 1),
        "mudd_b2": Param((2, NUM_MU), "bf16", "adam", 0.25),
        "mudd_gate_w1": Param((2, z.hidden, d), "bf16", "adam", 0.1, 1),
        "mudd_gate_w2": Param((2, k, z.hidden), "bf16", "adam", 0.1, 1),
        "mudd_gate_b2": Param((2, k), "bf16", "adam", 0.1),
        "_mudd_gate_scale": Param((), "fp32", "adam", 0.1),
    }


# ---- stages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """tokens of a micro-batch, longest document, windows in tokens, rate's peak, weights of the targets at
    start and end.
    """

    tokens: int
    cut: int
    window_short: int
    window_long: int
    peak: float
    targets: tuple
    targets_end: tuple
    prefix: float = 0.0
    prefix_end: float = 0.0


@dataclass(frozen=True)
class Schedule:
    scheduled: int = 1270
    extension: int = 15
    stages: tuple = (
        Stage(16384, 896, 128, 384, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), 0.25, 0.25),
        Stage(32768, 2048, 384, 896, 1.52, (1.0, 0.5), (1.0, 0.0), 0.25, 0.0),
        Stage(49152, 2048, 640, 1408, 1.73, (1.0,), (1.0,)),
    )
    last: Stage = Stage(49152, 2048, 768, 1664, 0.15, (1.0,), (1.0,))
    final_window: int = 2560  # long window of the last validation
    flat: float = 0.4  # share of the scheduled steps before the rate falls
    floor: float = 0.15
    exact_scales: int = 16  # steps after which the down-projection's scale is still exact
    warmup: int = 300  # of the momentum
    cooldown: int = 50

    @property
    def total(self):
        return self.scheduled + self.extension

    def begins(self):
        """First step of every stage, and of the extension."""
        n = len(self.stages)
        return [round(i * self.scheduled / n) for i in range(n + 1)]

    def stage_index(self, t):
        return sum(t >= b for b in self.begins()[1:])

    def stage(self, t):
        i = self.stage_index(t)
        return self.stages[i] if i < len(self.stages) else self.last

    def last_tied(self):
        """The odd step after whose update embedding and head part."""
        return self.begins()[-2] | 1

    def rate(self, t):
        start = math.floor(self.flat * self.scheduled)
        if t < start:
            return self.stage(t).peak
        u = min(1.0, (t - start) / (self.scheduled - start))
        return self.stage(t).peak * (1 - u) + self.floor * u

    def momentum(self, t):
        if t < self.warmup:
            return 0.85 + 0.1 * t / self.warmup
        start = self.total - self.cooldown
        return 0.95 - 0.1 * (t - start) / self.cooldown if t > start else 0.95

    def weights(self, t):
        """(weights of the targets, weight of the prefix term) at step t: linear between a stage's start and
        its end.
        """
        i, s, b = self.stage_index(t), self.stage(t), self.begins() + [self.total]
        u = (t - b[i]) / max(1, b[i + 1] - b[i])
        mix = [x + (y - x) * u for x, y in zip(s.targets, s.targets_end)]
        return mix, s.prefix + (s.prefix_end - s.prefix) * u


# ---- records ----------------------------------------------------------------------------------------------

def without_prefix(stages):
    return tuple(replace(s, prefix=0.0, prefix_end=0.0) for s in stages)


NARROW = dict(sizes=Sizes(qk_dim=96), wo_by_input=True, fp8=("head", "mlp-full", "qkv"))
RECORDS = {
    "2026-05-27": Record(
        schedule=Schedule(scheduled=1275, stages=without_prefix(Schedule.stages)), fp8=("head", "mlp-up")
    ),
    "2026-07-17": Record(schedule=Schedule()),
    "2026-08-03": Record(schedule=Schedule(extension=45), **NARROW),
    "2026-08-06": Record(schedule=Schedule(scheduled=1250, extension=40), masked=True, **NARROW),
}
