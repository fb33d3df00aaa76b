"""Records as tables: layers, parameters, stages, head. Nothing else in this package names a layer, a tensor or a constant of
one record.
"""
import dataclasses
from dataclasses import dataclass

# ---- what the tables hold -------------------------------------------------------------------------------------------

RUNNING, EMBEDDED = "running", "embedded"  # streams; a number is the output of that layer


@dataclass(frozen=True)
class Weight:
    """constant * s[scalar] * sigmoid(s[gate]), s the vector of trained scalars; what is None does not occur."""
    constant: float = 1.0
    scalar: int | None = None
    gate: int | None = None


@dataclass(frozen=True)
class Layer:
    """mix: sums that make the stream entering the layer, one after the other, each a tuple of (stream, Weight).

    v_lambdas: number of the scalar that multiplies v; the next one multiplies the value embedding.
    """
    mix: tuple = ()
    attention: bool = False
    long_window: bool = False
    value_table: int | None = None
    v_lambdas: int | None = None
    mlp: bool = False


@dataclass(frozen=True)
class Adam:
    """every: updated at steps t with (t + 1) % every == 0, on the sum of the gradients since the last update."""
    lr: float
    beta1: float
    beta2: float
    eps: float = 1e-8
    every: int = 2


@dataclass(frozen=True)
class NorMuon:
    """wide: never orthogonalised in half precision."""
    lr: float = 1.0
    beta2: float = 0.95
    wide: bool = False


@dataclass(frozen=True)
class Uniform:
    """U(-b, b) with b = scale d^-1/2 for the first `matrices` of the stacked matrices (None: all), zero for the others."""
    scale: float
    matrices: int | None = None


@dataclass(frozen=True)
class Param:
    """A tensor; with {} in its name one for each layer that has the block, or `count` of them.

    block: who reads it; attention's and the MLP's belong to layers. shape: numbers, sizes of the run, or products such as "4 model".
    storage: bf16, or fp32. init: None (zero), "normal", Uniform, or the values of a vector. matrices: the tensor is, in memory
    order, so many stacked matrices. shortest: a vector in a file may end after so many values.
    """
    block: str
    name: str
    shape: tuple
    storage: str
    update: Adam | NorMuon
    init: object = None
    count: int = 1
    matrices: int = 1
    shortest: int = 0


LAYER_BLOCKS = {"qkvo": "attention", "attention_gate": "attention", "mlp_up": "mlp", "mlp_down": "mlp"}


@dataclass(frozen=True)
class Stage:
    """window: the long one, in blocks. tokens of a micro-batch and longest document: None is the option's. rate: the highest factor.
    rate_after: the share of the scheduled steps behind which the rate holds; None: from the stage's first step on.
    """
    window: int
    tokens: int | None = None
    max_document: int | None = None
    rate: float = 1.0
    rate_after: float | None = None


@dataclass(frozen=True)
class Head:
    """Logits are cap * sigmoid(x / slope). FP8: x / (d^1/2 / 448) and w / w_scale in e4m3, g / g_scale in e5m2."""
    cap: float = 30.0
    slope: float = 7.5
    w_scale: float = 2.0 ** -9
    g_scale: float = 1.0 / 448


@dataclass(frozen=True)
class Record:
    """stages: the last one is the extension. starts: where k S / n falls between two steps the next one begins stage k ("up"),
    or the nearer one. output: the sum that is normalised for the head. to_floor: the rate falls to the floor, reached where the
    scheduled steps end, and not to 0.9999 of the way. v_lambda_on_qk: the factor of v multiplies q and k, too.
    """
    layers: tuple
    params: tuple
    output: tuple
    smear: int
    stages: tuple
    head: Head = Head()
    starts: str = "up"
    cooldown: float = 0.5     # share of the scheduled steps over which the rate falls
    floor: float = 0.1
    to_floor: bool = False
    v_lambda_on_qk: bool = False
    final_window: int = 20    # the last validation only
    adam_lr: float = 0.008
    normuon_lr: float = 0.03
    warmup_steps: int = 300   # of the momentum; neither of the two scales with the length of the run
    cooldown_steps: int = 50


# ---- autumn 2025 ----------------------------------------------------------------------------------------------------

NUM_LAYERS, GATE_WIDTH = 12, 12
BLOCK_LAMBDAS, V_LAMBDAS = NUM_LAYERS, 3 * NUM_LAYERS  # the first scalars are weights of skips
SMEAR, BACKOUT = 5 * NUM_LAYERS, 5 * NUM_LAYERS + 1
NUM_SCALARS, BOUND = 64, 0.5 * 3.0 ** 0.5
VALUE_TABLES = {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}


def layers_2025(skips):
    """skips: {layer: (weight of the skip, layer it comes from)}. The first layer is empty."""
    def one(i):
        lambdas = ((RUNNING, Weight(scalar=BLOCK_LAMBDAS + 2 * i)), (EMBEDDED, Weight(scalar=BLOCK_LAMBDAS + 2 * i + 1)))
        mix = (lambdas,)
        if i in skips:
            weight, source = skips[i]
            mix = (((RUNNING, Weight()), (source, Weight(gate=weight))), lambdas)
        if i == 7:
            return Layer(mix, mlp=True)
        return Layer(mix, True, i in (4, 11), VALUE_TABLES.get(i), V_LAMBDAS + 2 * i, True)
    return (Layer(),) + tuple(one(i) for i in range(1, NUM_LAYERS))


def params_2025(block_lambda):
    table, slow = Adam(75, 0.65, 0.95), Adam(1, 0.65, 0.95)
    scalars = [-1.5] * NUM_LAYERS + [block_lambda, 0.0] * NUM_LAYERS + [0.5, 0.5] * NUM_LAYERS + [0.0, 0.5]
    return (
        Param("embed", "embed.weight", ("vocab", "model"), "bf16", table, "normal"),
        Param("value_table", "value_embeds.{}.weight", ("vocab", "model"), "bf16", table, "normal", count=3),
        Param("head", "lm_head.weight", ("vocab", "model"), "bf16", slow),
        Param("smear_gate", "smear_gate.weight", (1, GATE_WIDTH), "bf16", NorMuon(wide=True)),
        Param("qkvo", "blocks.{}.attn.qkvo_w", ("model", "4 model"), "fp32", NorMuon(), Uniform(BOUND, 3), matrices=4),
        Param("attention_gate", "blocks.{}.attn.attn_gate.weight", ("heads", GATE_WIDTH), "bf16", NorMuon(wide=True)),
        Param("mlp_up", "blocks.{}.mlp.c_fc", ("model", "mlp"), "fp32", NorMuon(lr=2.0), Uniform(BOUND)),
        Param("mlp_down", "blocks.{}.mlp.c_proj", ("model", "mlp"), "fp32", NorMuon()),
        Param("scalars", "scalars", (NUM_SCALARS,), "fp32", Adam(5, 0.65, 0.95),
              tuple(scalars + [1.0] * (NUM_SCALARS - len(scalars))), shortest=len(scalars)),
    )


def record_2025(skips, block_lambda):
    return Record(layers_2025(skips), params_2025(block_lambda), ((RUNNING, Weight()), (8, Weight(-1.0, BACKOUT))), SMEAR,
                  (Stage(3), Stage(7), Stage(11), Stage(13)))


FIVE_SKIPS = record_2025({6: (0, 5), 7: (1, 4), 8: (2, 3), 9: (3, 2), 10: (4, 1)}, 1.0)
ONE_SKIP = record_2025({7: (1, 4)}, 1.1)

# Records 46 and 47: the batch grows by thirds of the scheduled steps, the rate behind 0.33 and 0.66 of them.
GROWING = dataclasses.replace(
    ONE_SKIP, cooldown=0.55, to_floor=True, normuon_lr=0.023,
    stages=(Stage(3, 16384), Stage(7, 32768, rate=1.51, rate_after=0.33), Stage(11, 49152, rate=1.93, rate_after=0.66), Stage(13, 49152)))
FACTOR_ON_QKV = dataclasses.replace(GROWING, v_lambda_on_qk=True)

# ---- toy: what the tables can say -----------------------------------------------------------------------------------


def toy():
    """5 layers: 1 and 3 have no attention, 2 has no MLP and takes the stream as it is, 3 adds the output of 1 through a gate; the
    head reads x minus half of the output of 2. Two stages of different sizes and an extension of a third.
    """
    n = 5
    lambdas, v_lambdas, smear = 1, 1 + 2 * n, 1 + 4 * n

    def mix(i, *more):
        return (((RUNNING, Weight(scalar=lambdas + 2 * i)), (EMBEDDED, Weight(scalar=lambdas + 2 * i + 1))) + more,)

    def attention(i):
        return dict(attention=True, v_lambdas=v_lambdas + 2 * i)
    layers = (
        Layer(mix(0), **attention(0), value_table=0, mlp=True),
        Layer(mix(1), mlp=True),
        Layer(**attention(2), long_window=True),
        Layer(mix(3, (1, Weight(gate=0))), mlp=True),
        Layer(mix(4), **attention(4), value_table=0, mlp=True),
    )
    table, gate, muon = Adam(75, 0.8, 0.9), Adam(1, 0.9, 0.99, every=1), NorMuon(beta2=0.9)
    scalars = (-1.0,) + (1.0, 0.1) * n + (0.5, 0.5) * n + (0.25, 1.0, 1.0)
    params = (
        Param("embed", "embed.weight", ("vocab", "model"), "bf16", table, "normal"),
        Param("value_table", "value_embeds.{}.weight", ("vocab", "model"), "bf16", table, "normal"),
        Param("head", "lm_head.weight", ("vocab", "model"), "bf16", Adam(1, 0.8, 0.9)),
        Param("mlp_up", "layers.{}.up", ("model", "mlp"), "fp32", NorMuon(2.0, 0.9), Uniform(0.5)),
        Param("mlp_down", "layers.{}.down", ("model", "mlp"), "fp32", muon),
        Param("qkvo", "layers.{}.qkvo", ("model", "4 model"), "fp32", muon, Uniform(0.5, 3), matrices=4),
        Param("attention_gate", "layers.{}.gate", ("heads", GATE_WIDTH), "bf16", gate),
        Param("smear_gate", "smear_gate.weight", (1, GATE_WIDTH), "bf16", gate),
        Param("scalars", "scalars", (len(scalars),), "fp32", Adam(5, 0.8, 0.9), scalars, shortest=smear + 1),
    )
    return Record(layers, params, ((RUNNING, Weight()), (2, Weight(-0.5))), smear,
                  (Stage(2, 64, 32, 1.0), Stage(4, 128, 64, 1.5), Stage(5, 96, 64, 1.0)), starts="nearest", cooldown=0.6)


# ---- the rows of a record as tensors --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """shape in numbers; layer: of a tensor of a layer, number: within a row of several, else None."""
    spec: Param
    shape: tuple
    layer: int | None = None
    number: int | None = None


def tensors(cfg):
    """{name: Tensor} in checkpoint order: the rows of a layer follow each other, layer by layer, where the first of them stands."""
    sizes = {"model": cfg.model_dim, "heads": cfg.num_heads, "mlp": cfg.mlp_dim, "vocab": cfg.padded_vocab_size}

    def extent(e):
        times, _, size = str(e).rpartition(" ")
        return int(times or 1) * sizes[size] if size in sizes else int(e)
    of_layers = [s for s in cfg.record.params if s.block in LAYER_BLOCKS]
    out, done = {}, False
    for spec in cfg.record.params:
        shape = tuple(extent(e) for e in spec.shape)
        if spec.block not in LAYER_BLOCKS:
            numbers = range(spec.count) if "{}" in spec.name else [None]
            out |= {spec.name.format(j): Tensor(spec, shape, number=j) for j in numbers}
        elif not done:
            done = True
            for i, layer in enumerate(cfg.record.layers):
                out |= {s.name.format(i): Tensor(s, tuple(extent(e) for e in s.shape), layer=i) for s in of_layers
                        if getattr(layer, LAYER_BLOCKS[s.block])}
    return out
