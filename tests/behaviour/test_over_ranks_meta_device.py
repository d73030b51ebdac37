"""A model built on the meta device: each rank has memory and values for its own stages, and trains as the plain one."""

import ctypes
import gc
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.rank_models import MIXED_CUTS, Mixed, assert_parts, token_loss, tokens
from helpers.ranks import Ranks
from safetensors.torch import save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, DistributedError, StateError

QUICK = {"progress": False, "hardware": "cpu"}


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


def meta_pipe(mesh, **options):
    x, _ = tokens(7, 5, 1)
    model = on_meta(Mixed, 0.0)
    return fxpipe.pipeline(model, mesh, 3, example_args=(x,), balance=MIXED_CUTS[mesh.size()], **QUICK | options)


def plain_mixed():
    torch.manual_seed(3)
    return Mixed(0.0)


# -- Checkpoints -----------------------------------------------------------------------------------------------------


def save_quietly(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is no process group
        dcp.save(state, checkpoint_id=folder)


def refused_checkpoints(mesh, folder):
    pipe, folder = meta_pipe(mesh), Path(folder)
    texts = []
    for name, key in [("less", ""), ("more", ""), ("more", "modul"), ("wide", ""), ("untied", "")]:
        with pytest.raises((ArgumentError, DistributedError)) as caught:
            fxpipe.distributed.load(pipe, folder / name, key=key)
        texts.append(str(caught.value))
    assert all(p.is_meta for p in pipe.parameters())  # nothing was loaded
    with pytest.raises(StateError) as caught:
        fxpipe.distributed.load(pipe, folder / "less", strict=False)
    texts.append(str(caught.value))
    fxpipe.distributed.initialize(pipe)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    fxpipe.distributed.load(pipe, folder / "less", strict=False)
    kept = [name for name, p in pipe.named_parameters() if torch.equal(before[name], p)]
    return texts, kept


def test_checkpoints_that_do_not_fit_are_one_error_on_all_ranks(two_ranks, tmp_path):
    state = dict(plain_mixed().state_dict())
    save_quietly({"model": state}, tmp_path / "more")
    save_quietly(state | {"l.0.weight": torch.zeros(8, 9), "l.3.bias": torch.zeros(())}, tmp_path / "wide")
    save_quietly(state | {"head.weight": torch.zeros(11, 8)}, tmp_path / "untied")
    save_quietly({k: v for k, v in state.items() if k not in ("l.0.bias", "norm.weight")} | {"x": state["l.0.bias"]},
                 tmp_path / "less")  # fmt: skip
    (ours, kept), (theirs, theirs_kept) = two_ranks.run(refused_checkpoints, str(tmp_path))
    less, more, wrong_key, wide, _, no_values = ours
    assert [*ours[:4], no_values] == [*theirs[:4], theirs[5]]
    assert "does not fit the model: it lacks 'l.0.bias', 'norm.weight'; it has 'x', which the model has not" in less
    assert "give key='model'" in more
    assert "Its keys begin with 'model'" in wrong_key
    assert "'l.0.weight' ((8, 9), in the model (8, 8))" in wide
    assert "'l.3.bias' ((), in the model (8,))" in wide
    assert all("'emb.weight' and 'head.weight' are one tied weight" in texts[4] for texts in (ours, theirs))
    assert "without values after fxpipe.distributed.load: 'l.0.bias', 'norm.weight'" in no_values
    assert (kept, theirs_kept) == (["l.0.bias"], ["norm.weight", "norm.bias"])  # zeros are what both have


# -- Initialization --------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of many kinds, each of which initializes itself; buffers, a recurrent layer, attention."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.act = nn.PReLU()
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 11))

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.layer(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.act(self.rnn(x)[0]))


def train_initialized(mesh, make, seed, cuts, steps):
    x, t = tokens(6, 5, 1)
    pipe = fxpipe.pipeline(on_meta(make), mesh, 2, example_args=(x,), balance=cuts, **QUICK)
    torch.manual_seed(seed + mesh.get_rank())  # the generator of rank 0 counts
    fxpipe.distributed.initialize(pipe)
    following = torch.rand(3)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    elsewhere = [name for name, p in pipe.model.named_parameters() if p.is_meta]
    losses = [pipe.forward_backward(x, target=t, loss_fn=token_loss).item() for _ in range(steps)]
    assert elsewhere == [name for name, p in pipe.model.named_parameters() if p.is_meta]
    assert not {*elsewhere} & {*dict(pipe.named_parameters())}
    assert elsewhere
    return state, following, losses, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
def test_an_initialized_pipe_has_the_weights_of_the_plain_model_made_with_the_seed(two_ranks, four_ranks, size):
    ranks, cuts = {2: (two_ranks, ["layer"]), 4: (four_ranks, ["norm", "attention", "rnn"])}[size]
    results = ranks.run(train_initialized, Layers, 3, cuts, 2)
    torch.manual_seed(3)
    model = Layers()
    following = torch.rand(3)
    assert_parts([state for state, *_ in results], model.state_dict())
    x, t = tokens(6, 5, 1)
    losses = []
    for _ in range(2):
        parts = [token_loss(model(x[k : k + 3]), t[k : k + 3]) / 2 for k in (0, 3)]
        sum(parts).backward()
        losses.append(sum(part.item() for part in parts))
    for _, drawn, own_losses, gradients in results:
        assert torch.equal(drawn, following)
        torch.testing.assert_close(own_losses, losses)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


class Rotary(nn.Module):
    """A table that __init__ computes, which is in no checkpoint; a plain tensor, and one in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(8.0) / 8, persistent=False)
        self.shift = torch.tensor(2.0)
        self.masks = [torch.ones(8)]

    def forward(self, x):
        return x * self.table * self.masks[0] + self.shift


class Block(Layered, inner=8, outer=8, rotary=Rotary, scale=lambda: nn.Parameter(torch.ones(8))):
    def forward(self, x):
        return self.outer(torch.tanh(self.inner(self.rotary(x)))) * self.scale


class Tables(
    Layered, emb=lambda: nn.Embedding(11, 8), blocks=lambda: nn.ModuleList(Block() for _ in range(2)), head=(8, 11)
):
    """Values that only a function of the user's knows to compute."""

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def fill_tables(module):
    """Initializes as models do that initialize their children, by `.data`, in place, and by other tensors."""
    if isinstance(module, Rotary):
        module.table.copy_(torch.arange(8.0) / 8)
        module.shift = torch.tensor(2.0)
        module.masks = [torch.ones(8)]
    elif isinstance(module, Block):
        module.scale = nn.Parameter(torch.rand(8))
        nn.init.trunc_normal_(module.outer.weight, std=0.02 / 2)
        module.outer.bias.data.zero_()
    elif isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.bias.data.uniform_(-0.1, 0.1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0.0, 0.5)


def draw_by_rank(module):
    if isinstance(module, nn.Linear):
        module.weight.data.normal_() if torch.distributed.get_rank() == 0 else module.weight.data.fill_(0.0)


def train_tables(mesh, path):
    x, t = tokens(6, 5, 1)
    pipe = fxpipe.pipeline(on_meta(Tables), mesh, 2, example_args=(x,), balance=["blocks.0"], **QUICK)
    errors = []
    for fill in [
        lambda: fxpipe.distributed.initialize(pipe),
        lambda: fxpipe.distributed.load(pipe, path),
        lambda: pipe.forward_backward(x, target=t, loss_fn=token_loss),
        lambda: fxpipe.distributed.initialize(pipe, draw_by_rank),
    ]:
        with pytest.raises(StateError) as caught:
            fill()
        errors.append(str(caught.value))
    torch.manual_seed(3)
    fxpipe.distributed.initialize(pipe, fill_tables)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    losses = [pipe.forward_backward(x, target=t, loss_fn=token_loss).item()]
    fxpipe.distributed.load(pipe, path)  # the tables have values by now
    losses.append(pipe.forward_backward(x, target=t, loss_fn=token_loss).item())
    again = fxpipe.pipeline(on_meta(Tables), mesh, 2, example_args=(x,), balance=["blocks.0"], **QUICK)
    before = torch.get_rng_state()
    fxpipe.distributed.load(again, path, init_fn=fill_tables)
    assert torch.equal(before, torch.get_rng_state())
    losses.append(again.forward_backward(x, target=t, loss_fn=token_loss).item())
    return errors, state, losses


def test_what_init_computes_is_named_until_a_function_of_the_user_fills_it(two_ranks, tmp_path):
    torch.manual_seed(7)
    loaded = Tables()
    save_quietly(loaded.state_dict(), tmp_path / "tables")
    results = two_ranks.run(train_tables, str(tmp_path / "tables"))
    torch.manual_seed(3)
    model = Tables()
    torch.manual_seed(3)
    with torch.no_grad():
        model.apply(fill_tables)
    assert_parts([state for _, state, _ in results], model.state_dict())
    x, t = tokens(6, 5, 1)
    expected = [token_loss(one(x), t).item() for one in (model, loaded, loaded)]
    for _, _, losses in results:
        assert losses == pytest.approx(expected)
    initialized, load, step, drawn = results[0][0]
    assert [initialized, load, drawn] == [results[1][0][k] for k in (0, 1, 3)]
    for name in ("blocks.0.rotary.table", "blocks.0.rotary.shift", "blocks.0.rotary.masks.0", "blocks.0.scale"):
        assert f"'{name}'" in initialized
        assert (f"'{name}'" in load) == (name != "blocks.0.scale")
    assert "if isinstance(module, Block):\n            module.scale.copy_(...)" in initialized
    assert "fxpipe.distributed.initialize(pipe, init_fn=init_fn)" in initialized
    assert "if isinstance(module, Rotary):\n            module.table.copy_(...)" in load
    assert "fxpipe.distributed.load(pipe, path, init_fn=init_fn)" in load
    assert "no values for 'blocks.0.rotary.table'" in step
    assert "the ranks have drawn different random numbers" in drawn


def train_replicas(mesh):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    x, t = tokens(6, 5, 1)
    options = {"data_parallel": square["data"], "example_args": (x,), "balance": ["layer"], **QUICK}
    pipe = fxpipe.pipeline(on_meta(Layers), square["pipe"], 2, **options)
    torch.manual_seed(3 + mesh.get_rank())
    fxpipe.distributed.initialize(pipe)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    own = slice(3) if square["data"].get_local_rank() == 0 else slice(3, 6)
    losses = [pipe.forward_backward(x[own], target=t[own], loss_fn=token_loss).item()]
    return state, losses, {name: p.grad for name, p in pipe.named_parameters()}


def test_replicas_are_initialized_alike(four_ranks):
    results = four_ranks.run(train_replicas)
    torch.manual_seed(3)
    model = Layers()
    assert_parts([state for state, *_ in results], model.state_dict())
    x, t = tokens(6, 5, 1)
    parts = [piece for own in (slice(3), slice(3, 6)) for piece in zip(x[own].split(2), t[own].split(2), strict=True)]
    loss = sum(token_loss(model(part), target) * (len(part) / 6) for part, target in parts)
    loss.backward()
    for _, losses, gradients in results:
        assert losses == [pytest.approx(loss.item())]
        torch.testing.assert_close(gradients, {name: model.get_parameter(name).grad for name in gradients})


# -- Models of Hugging Face ------------------------------------------------------------------------------------------


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def loss_of_logits(out, target):
    return F.cross_entropy(out.logits.flatten(0, 1), target.flatten())


def train_llama(mesh, folder):
    model = on_meta(llama)
    x, t = tokens(8, 6, 1)
    pipe = fxpipe.pipeline(model, mesh, 2, example_kwargs={"input_ids": x}, **QUICK)
    fxpipe.distributed.load(pipe, folder, init_fn=model._init_weights)  # which computes rotary tables as well
    loss = pipe.forward_backward(input_ids=x, target=t, loss_fn=loss_of_logits).item()
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def test_a_model_of_hugging_face_is_loaded_from_the_shards_it_is_shipped_in(two_ranks, tmp_path):
    torch.manual_seed(3)
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    x, t = tokens(8, 6, 1)
    loss = loss_of_logits(model(input_ids=x), t)
    loss.backward()
    for own, gradients in two_ranks.run(train_llama, str(tmp_path)):
        assert own == pytest.approx(loss.item())
        torch.testing.assert_close(gradients, {name: model.get_parameter(name).grad for name in gradients})


# -- A pipe without values -------------------------------------------------------------------------------------------


def use_without_values(mesh):
    pipe, (x, t) = meta_pipe(mesh), tokens(7, 5, 1)
    texts = []
    for call in [lambda: pipe.forward_backward(x, target=t, loss_fn=token_loss), lambda: pipe.to_empty(device="cpu")]:
        with pytest.raises(StateError) as caught:
            call()
        texts.append(str(caught.value))
    pipe.eval()
    with torch.no_grad(), pytest.raises(StateError) as caught:
        pipe(x)
    texts.append(str(caught.value))
    pipe.train()
    assert pipe.training
    assert all(value.is_meta for value in pipe.state_dict().values())
    parameters = dict(pipe.named_parameters())
    pipe.load_state_dict(plain_mixed().state_dict())  # of which a rank takes its part
    assert all(p is parameters[name] and not p.is_meta for name, p in pipe.named_parameters())
    pipe.to("cpu")
    loss = pipe.forward_backward(x, target=t, loss_fn=token_loss).item()
    pipe.to(torch.bfloat16)
    assert {p.dtype for p in pipe.model.parameters()} == {torch.bfloat16}
    half = pipe.forward_backward(x, target=t, loss_fn=token_loss).item()
    return texts, loss, half, len(parameters)


def test_a_step_without_values_names_the_functions_that_give_some(two_ranks):
    results = two_ranks.run(use_without_values)
    x, t = tokens(7, 5, 1)
    model = plain_mixed()
    parts = zip(x.tensor_split(3), t.tensor_split(3), strict=True)
    expected = sum(token_loss(model(part), target).item() * len(part) / 7 for part, target in parts)
    for texts, loss, half, _ in results:
        for text in texts:
            assert "fxpipe.distributed.load(pipe, path)" in text
            assert "fxpipe.distributed.initialize(pipe)" in text
        assert loss == pytest.approx(expected)
        assert half == pytest.approx(expected, rel=0.02)
    assert sum(count for *_, count in results) == len(dict(model.named_parameters())) + 1  # the tied one is on both


def misuse(mesh):
    x, _ = tokens(7, 5, 1)
    unplanned = fxpipe.pipeline(on_meta(Mixed), mesh, 3, **QUICK)
    with pytest.raises(StateError, match="example_args"):
        fxpipe.distributed.initialize(unplanned)
    with pytest.raises(ArgumentTypeError, match="init_fn is a str"):
        fxpipe.distributed.initialize(unplanned, "normal")
    model = Mixed() if mesh.get_rank() else on_meta(Mixed)
    with pytest.raises(ArgumentError, match=r"ranks differ in model .* without values"):
        fxpipe.pipeline(model, mesh, 3, example_args=(x,), **QUICK)
    return True


def test_misuse_of_load_and_initialize_is_a_clear_error(two_ranks):
    assert two_ranks.run(misuse) == [True, True]


def keep_whole(mesh):
    model, (x, _) = plain_mixed(), tokens(7, 5, 1)
    expected = model.eval()(x)
    pipe = fxpipe.pipeline(model.train(), mesh, 3, example_args=(x,), balance=MIXED_CUTS[2], **QUICK)
    assert len([*pipe.parameters()]) < len([*model.parameters()])
    return torch.equal(model.eval()(x), expected)


def test_a_model_that_is_whole_stays_whole_on_each_rank(two_ranks):
    assert two_ranks.run(keep_whole) == [True, True]


# -- Memory ----------------------------------------------------------------------------------------------------------

MIB = 2**20


class Deep(nn.Module):
    def __init__(self, width, layers=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def resident(field):
    """A figure of this process's memory, as the kernel counts it, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def peak_of(function):
    """The growth of this process's memory at its highest, in MiB, and what the function has returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free, and would be used again, is not counted as in use
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    result = function()
    return resident("VmHWM") - before, result


def filled(mesh, width, path, meta=True):
    x = torch.zeros(4, width)
    model = on_meta(Deep, width) if meta else Deep(width)
    pipe = fxpipe.pipeline(model, mesh, 2, example_args=(x,), **QUICK)
    if path is not None:
        fxpipe.distributed.load(pipe, path)
    elif meta:
        fxpipe.distributed.initialize(pipe)
    return sum(p.nbytes for p in pipe.parameters()) / MIB


def measure(mesh, path, small, meta):
    filled(mesh, 16, small, meta)  # what is imported and started once
    return peak_of(lambda: filled(mesh, 1024, path, meta))


def can_measure():
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return hasattr(ctypes.CDLL(None), "malloc_trim")
    except OSError:
        return False


WHOLE = 64.0  # MiB of Deep(1024)
SLACK = 28.0  # what planning leaves until it is collected, and a layer that is initialized for another rank


@pytest.mark.skipif(not can_measure(), reason="the kernel does not tell this process's peak memory")
@pytest.mark.parametrize(
    ("size", "kind", "copies"),
    [
        (2, "dcp", 1),
        pytest.param(4, "safetensors", 2, marks=pytest.mark.slow),  # whose files are mapped
        pytest.param(4, "initialized", 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_the_peak_memory_of_a_rank_is_its_share(size, kind, copies, tmp_path):
    paths = [None, None]
    if kind != "initialized":
        paths = [str(tmp_path / f"{width}.safetensors") for width in (1024, 16)]
        for path, width in zip(paths, (1024, 16), strict=True):
            model = Deep(width)
            save_model(model, path) if kind == "safetensors" else save_quietly(model.state_dict(), path)
            del model
    with Ranks(size) as ranks:
        for peak, share in ranks.run(measure, *paths, True):
            assert share == pytest.approx(WHOLE / size, rel=0.01)
            assert 0.9 * share < peak < copies * share + SLACK < WHOLE
        if kind == "dcp":  # the measure would show a model that is whole
            assert all(peak > WHOLE for peak, _ in ranks.run(measure, None, None, False))


def plan_large(mesh):
    def plan():
        x = torch.zeros(4, 2**15)
        return fxpipe.pipeline(on_meta(Deep, 2**15), mesh, 2, example_args=(x,), **QUICK).plan

    peak, plan = peak_of(plan)
    return peak, sum(stage.parameter_bytes for stage in plan.stages)


@pytest.mark.skipif(not can_measure(), reason="the kernel does not tell this process's peak memory")
def test_a_model_of_64_gib_is_planned_over_ranks_without_values(two_ranks):
    for peak, size in two_ranks.run(plan_large):
        assert size > 64 * 2**30
        assert peak < 100
