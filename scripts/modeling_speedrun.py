"""The GPT of the NanoGPT speedrun (track 1) for transformers: any record, by the tables in config.json.

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))

A text begins with the document token, which the tokenizer puts there; where that token stands within a
sequence, another document begins. There is no cache of keys and values: every new token is a forward pass
over all tokens before it. Products and sums are fp32; what the trainer stores is rounded here, too, to the
dtype of the weights (dtype=torch.float32: not at all). `config.network` says what the network is: sizes,
layers, where in the tensors each parameter lies.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

EPS = 2.0**-23
HASH_CURRENT, HASH_PREVIOUS = 36313, 27191


class SpeedrunConfig(PretrainedConfig):
    model_type = "gpt_speedrun"

    def __init__(self, network=None, **others):
        self.network = network or {}
        super().__init__(**others)


# ---- pieces: fp32 tensors in and out ---------------------------------------------------------------------


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate_halves(x, cos, sin):
    """x [N, H, e], tables [N, 1, e/4]: channel j with channel j + e/2; the second quarter stays."""
    cos, sin = F.pad(cos, (0, cos.shape[-1]), value=1.0), F.pad(sin, (0, sin.shape[-1]))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def rotate_pairs(x, cos, sin):
    """x [N, H, e], tables [N, 1 or H, e/4]: channel 2j with channel 2j + 1; the second half stays."""
    turned, fixed = x.chunk(2, -1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    return torch.cat([torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2), fixed], -1)


def probabilities(q, k, documents, window, scale):
    """[H, N, N] from q, k [N, H, e]: query i sees key j <= i of its document, i - j <= window."""
    at = torch.arange(len(q), device=q.device)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance <= window) & (documents[:, None] == documents)
    return (scale * torch.einsum("ihe,jhe->hij", q, k)).masked_fill(~seen, float("-inf")).softmax(-1)


def attend(q, k, v, documents, window, scale):
    return torch.einsum("hij,jhe->ihe", probabilities(q, k, documents, window, scale), v)


def as_int32(x):
    return (x + 2**31) % 2**32 - 2**31


def pair_rows(ids, rows, sign_rows):
    """Of each token the row of the bigram table and that of the signs, from it and the token before."""
    before = torch.cat([ids[:1], ids[:-1]])
    signs = (before ^ ids) % sign_rows
    before = before.clone()
    before[1:2] = rows - 1
    bigrams = (as_int32(HASH_CURRENT * ids) ^ as_int32(HASH_PREVIOUS * before)) % (rows - 1)
    bigrams[0] = rows - 1
    return bigrams, signs


# ---- the network -----------------------------------------------------------------------------------------


class Pass:
    """The forward pass of one sequence."""

    def __init__(self, model, ids):
        self.tensor, self.net = model.get_parameter, model.config.network
        self.table = {(p["role"], p["number"]): p for p in self.net["parameters"]}
        self.ids, self.documents = ids, (ids == model.config.bos_token_id).cumsum(0)
        self.streams, self.norms, self.columns = {}, {}, {}
        numbers = sorted(number for role, number in self.table if role == "scalar")
        self.s = torch.cat([self.weight("scalar", n).flatten() for n in numbers])

    # ---- parameters, factors ------------------------------------------------------------------------------

    def weight(self, role, number=0):
        """[matrices * rows, cols], fp32; None where the network has no such parameter."""
        p = self.table.get((role, number))
        if p is None:
            return None
        rows, cols = (p["cols"], p["rows"]) if p["transposed"] else (p["rows"], p["cols"])
        t = self.tensor(p["tensor"]).reshape(-1, rows, cols)[p["first"] : p["first"] + p["matrices"]]
        return (t.mT if p["transposed"] else t).reshape(-1, p["cols"]).float()

    def rows(self, role, number, at):
        """Rows of a table, fp32, without a copy of all of it."""
        p = self.table[role, number]
        rows, cols = (p["cols"], p["rows"]) if p["transposed"] else (p["rows"], p["cols"])
        table = self.tensor(p["tensor"]).reshape(-1, rows, cols)[p["first"]]
        return (table.mT if p["transposed"] else table)[at].float()

    def store(self, x):
        return x.to(self.tensor(self.table["embed", 0]["tensor"]).dtype).float()

    def coefficient(self, c):
        value = torch.tensor(float(c["factor"]), device=self.s.device)
        if "scalar" in c:
            value = value * self.s[c["scalar"]]
        return value * torch.sigmoid(self.s[c["gate"]]) if "gate" in c else value

    def mix(self, terms):
        """The sum of a list, not rounded."""
        total = 0.0
        for term in terms:
            name, c = term["stream"], self.coefficient(term)
            table = int(name[5:]) if name.startswith("rows ") else None
            x = self.streams[name] if table is None else self.rows("value_embed", table, self.ids)
            if "column" in term:
                c = c * self.column(term["column"], 1)
            total = total + (c + term.get("plus", 0.0)) * x
        return total

    def column(self, column, count):
        """[N, count]: of what a generator makes for every token."""
        generator, first = column
        return self.columns[generator][:, first : first + count]

    # ---- blocks -------------------------------------------------------------------------------------------

    def run(self, x):
        """The running stream becomes x, which is rounded after its norm is taken."""
        self.streams["running"], self.norms["running"] = self.store(x), self.store(rms(x))

    def keep(self, name):
        """Gives the running stream a name, and runs the generators that read it."""
        x = self.streams[name] = self.streams["running"]
        self.norms[name] = self.norms["running"]
        for g, spec in enumerate(self.net["generators"]):
            if spec["input"] != name:
                continue
            hidden = F.gelu(x @ self.weight("generator_in", g).T)
            out = hidden @ self.weight("generator_out", g).T + self.weight("generator_bias", g)
            self.columns[g] = self.coefficient(spec) * out

    def embed(self):
        e, gate = self.rows("embed", 0, self.ids), self.weight("smear_gate")
        smear = self.s[self.net["smear_scalar"]] * torch.sigmoid(e[1:, : gate.shape[1]] @ gate.T)
        if "pair_hash" in self.net:
            bigrams, signs = pair_rows(self.ids, **self.net["pair_hash"])
            self.streams["bigram"] = self.rows("bigram", 0, bigrams) * self.rows("signs", 0, signs)
        self.run(self.store(rms(torch.cat([e[:1], e[1:] + smear * e[:-1]]))))
        self.keep("embedded")

    def tables(self, positions):
        angle = positions[..., None].float() * torch.tensor(self.net["frequencies"], device=positions.device)
        return self.store(angle.cos()), self.store(angle.sin())

    def window(self, layer):
        return self.net["window_long" if layer["long_window"] else "window_short"]

    def projections(self, i):
        """Wq, Wk, Wv, Wo of layer i, [out, in] each."""
        parts = [self.weight(role, i) for role in ("qkvo", "vo", "o")]
        d, qk = self.net["model_dim"], self.net["num_heads"] * self.net["key_width"]
        return torch.cat([p for p in parts if p is not None]).split([qk, qk, d, d])

    def plain_attention(self, i, layer, h):
        """Values mixed by two scalars, an output gate from the first channels of h."""
        n, heads = len(h), self.net["num_heads"]
        wq, wk, wv, wo = self.projections(i)
        tables = [t[:, None] for t in self.tables(torch.arange(n, device=h.device))]
        q, k = (self.store(rotate_halves(rms((h @ w.T).view(n, heads, -1)), *tables)) for w in (wq, wk))
        v = self.s[layer["value_scalars"]] * (h @ wv.T)
        if "value_table" in layer:
            u = self.rows("value_embed", layer["value_table"], self.ids)
            v = v + self.s[layer["value_scalars"] + 1] * u
        v = self.store(v).view(n, heads, -1)
        gate = self.weight("attention_gate", i)
        y = attend(q, k, v, self.documents, self.window(layer), self.net["attention_scale"])
        y = y * torch.sigmoid(h[:, : gate.shape[1]] @ gate.T)[:, :, None]
        return self.store(y).flatten(1) @ wo.T

    def keys(self, heads, raw_q, raw_k):
        """Normalised and rotated; with offset the channels that are not rotated are the token before's."""
        n, count, width = raw_q.shape
        at = torch.arange(n, device=raw_q.device)[:, None]
        if heads["paired"]:
            at = 2 * at + torch.arange(count, device=at.device) % 2
        cos, sin = self.tables(at)
        q, k = (self.store(rotate_pairs(rms(x), cos, sin)) for x in (raw_q, raw_k))
        if heads["offset"]:
            fixed = k[..., width // 2 :]
            k = torch.cat([k[..., : width // 2], torch.cat([fixed[:1], fixed[:-1]])], -1)
        return q, k

    def values(self, layer, h, raw):
        heads, count = layer["heads"], self.net["num_heads"]
        v = raw + self.store(self.mix(heads["extra"])) if "extra" in heads else raw
        if "value_table" in layer:
            u = self.rows("value_embed", layer["value_table"], self.ids)
            if "value_column" in heads:
                groups = heads["value_groups"]
                gate = self.column(heads["value_column"], groups).repeat_interleave(count // groups, 1)
            else:
                w = self.weight("value_gate", layer["value_table"])
                lead = w.shape[1] // 2
                gate = 2 * torch.sigmoid(torch.cat([h[:, :lead], u[:, :lead]], 1) @ w.T)
            v = v + (gate[:, :, None] * u.view(len(u), count, -1)).flatten(1)
        return self.store(v).view(len(v), count, -1)

    def add_dc(self, heads, y, q, k, v):
        """Over few keys: the heads' probabilities mixed into one set, which every head applies."""
        w1, w2 = (self.column(heads[c], self.net["num_heads"]) for c in ("dc_weights", "dc_factors"))
        w1 = w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + 1e-6)
        p = probabilities(q, k, self.documents, self.net["dc_keys"] - 1, self.net["attention_scale"])
        return y + w2[:, :, None] * torch.einsum("ih,hij,jne->ine", w1, p, v)

    def heads_attention(self, i, layer, h):
        """Attention of the records of 2026: value gates, pairs of heads, DC, XSA, output gate."""
        heads, count = layer["heads"], self.net["num_heads"]
        lin, lout = self.s[heads["factor_scalars"]], self.s[heads["factor_scalars"] + 1]
        wq, wk, wv, wo = self.projections(i)
        q, k = self.keys(heads, *(lin * (h @ w.T).view(len(h), count, -1) for w in (wq, wk)))
        v = self.values(layer, h, lin * (h @ wv.T))
        pair = 2 if heads["paired"] else 1
        pairs = [x.reshape(pair * len(x), count // pair, -1) for x in (q, k, v)]
        documents = self.documents.repeat_interleave(pair)
        y = self.store(attend(*pairs, documents, self.window(layer), self.net["attention_scale"])).reshape(
            v.shape
        )
        if "dc_weights" in heads:
            y = self.store(self.add_dc(heads, y, q, k, v))
        if "xsa" in heads:
            alpha = torch.tanh(self.column(heads["xsa"], count))[:, :, None]
            y = (
                y
                - alpha * (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8) * v
            )
        if "gate" in heads:
            y = y * self.column(heads["gate"], count)[:, :, None]
        return lout * (self.store(y).flatten(1) @ wo.T)

    def add(self, branch, terms):
        """The residual stream behind a block."""
        if not terms:
            self.run(self.store(self.streams["running"] + branch))
            return
        self.streams["branch"] = self.store(branch)
        self.run(self.mix(terms))

    def layer(self, i, layer):
        if "mix" in layer:
            self.run(self.mix(layer["mix"]))
        self.keep(f"in {i}")
        if "heads" in layer:
            h = self.norms[layer["heads"]["input"]]
            self.add(self.heads_attention(i, layer, h), layer.get("after_attention"))
        elif "value_scalars" in layer:
            y = self.plain_attention(i, layer, self.norms["running"])
            self.add(y, layer.get("after_attention"))
        if layer["mlp"]:
            post = self.store(torch.relu(self.norms["running"] @ self.weight("mlp_up", i)).square())
            self.add(post @ self.weight("mlp_down", i).T, layer.get("after_mlp"))
        self.keep(f"out {i}")

    def hidden(self):
        """[N, d]: what the head reads."""
        self.embed()
        for i, layer in enumerate(self.net["layers"]):
            self.layer(i, layer)
        if "output" in self.net:
            self.run(self.mix(self.net["output"]))
        return self.norms["running"]

    def logits(self, rows):
        """[rows, padded vocabulary], capped, of the last rows; 0: of all."""
        head = self.net["head"]
        raw = self.hidden()[-rows:] @ self.weight("head").T
        return head["cap"] * torch.sigmoid((raw + head["shift"]) / head["slope"])


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """Holds the tensors, under their names in checkpoints."""

    config_class = SpeedrunConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        parameters = config.network["parameters"]
        for tensor, shape in {p["tensor"]: p["shape"] for p in parameters}.items():
            module, (*path, name) = self, tensor.split(".")
            for child in path:
                if child not in module._modules:
                    module.add_module(child, nn.Module())
                module = module._modules[child]
            module.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._keep_in_fp32_modules_strict = {p["tensor"] for p in parameters if p["storage"] == "fp32"}
        self.post_init()

    def _init_weights(self, module):
        pass  # weights come from a file

    def forward(self, input_ids, attention_mask=None, labels=None, logits_to_keep=0, **others):
        """logits [batch, rows, vocabulary], capped, of the last `logits_to_keep` tokens (0: of all).
        labels: as the input; the loss is the mean over the tokens that are predicted and not -100.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("sequences cannot be padded: give those of one length, or one at a time")
        rows = 0 if labels is not None else logits_to_keep
        z = torch.stack([Pass(self, ids).logits(rows) for ids in input_ids])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            z = z[:, -logits_to_keep:]
        return CausalLMOutput(loss=loss, logits=z[..., : self.config.vocab_size])
