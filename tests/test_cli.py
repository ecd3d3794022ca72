"""The command line: `generate` and `doctor` do what they say, and bad input costs one line and exit code 2."""

import io
import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from replayssm import bundled, cli, ops
from replayssm.cli.generate import generate, stepwise_counters
from replayssm.loading import load_model
from replayssm.loading.architectures import FAMILIES, MODEL_TYPES
from replayssm.options import GenerateOptions, LoadOptions
from replayssm.state import LayerSpec

NAMES = bundled.names()
RING_LENS = (1, 4, 8, 16, 32)
TOKENS = 256
PROMPT = "The Python standard library "

RESULT_KEYS = {
    "text", "token_ids", "prompt_tokens", "new_tokens", "ring_len", "backend", "flushes", "state_bytes_read",
    "state_bytes_written", "state_bytes_written_stepwise", "seconds", "tokens_per_second",
}  # fmt: skip


@pytest.fixture
def replayssm(capfd):
    """Run the command in this process: gives exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(a) for a in args])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def folder(tmp_path):
    """A copy of the first bundled model, to break."""
    copy = tmp_path / "model"
    shutil.copytree(bundled.path(NAMES[0]), copy)
    return copy


# --- the same tokens with and without replay, at 1/L of the state writes


@pytest.fixture(scope="module", params=NAMES)
def stepwise(request):
    """A bundled model and what transformers' own step gives."""
    loaded = load_model(request.param)
    return loaded, generate(loaded, PROMPT, GenerateOptions(max_new_tokens=TOKENS, ignore_eos=True, replay=False))


@pytest.mark.slow
@pytest.mark.parametrize("ring_len", RING_LENS)
def test_replay_gives_the_same_tokens_for_a_share_of_the_state_writes(stepwise, ring_len):
    loaded, without = stepwise
    result = generate(loaded, PROMPT, GenerateOptions(max_new_tokens=TOKENS, ring_len=ring_len, ignore_eos=True))
    assert without.new_tokens == TOKENS
    assert result.token_ids == without.token_ids
    assert result.text == without.text
    assert result.state_bytes_written_stepwise == without.state_bytes_written_stepwise == without.state_bytes_written
    assert result.state_bytes_written / without.state_bytes_written == pytest.approx(1 / ring_len, rel=0.05)
    assert result.flushes == (TOKENS - 1) // ring_len
    assert result.decode_steps == without.decode_steps == TOKENS - 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_replay_gives_the_same_tokens_on_a_gpu(name):
    loaded = load_model(name, LoadOptions(device="cuda", dtype="float32"))
    without = generate(loaded, PROMPT, GenerateOptions(max_new_tokens=64, ignore_eos=True, replay=False))
    result = generate(loaded, PROMPT, GenerateOptions(max_new_tokens=64, ignore_eos=True))
    assert result.device == "cuda"
    assert result.token_ids == without.token_ids


def test_the_prefill_write_counts_in_stepwise_too():
    layer = LayerSpec("head", "delta", 2, 4, 16, 8, 128, 4)
    counted = stepwise_counters([layer, layer], decode_steps=10)
    state = 2 * 4 * 16 * 8 * 4
    assert counted["state_bytes_written"] == counted["state_bytes_written_stepwise"] == 11 * state
    assert counted["state_bytes_read"] == 10 * state


# --- generate


@pytest.mark.parametrize("name", NAMES)
def test_json_is_one_object_with_every_key(replayssm, name):
    args = ("generate", "--model", name, "--prompt", PROMPT, "--max-new-tokens", "20", "--ignore-eos", "--json")
    code, out, err = replayssm(*args)
    assert code == 0, err
    result = json.loads(out)
    assert out.count("\n") == 1
    assert result.keys() >= RESULT_KEYS
    assert result["new_tokens"] == len(result["token_ids"]) == 20
    assert (result["ring_len"], result["backend"]) == (16, ops.resolve_backend("auto"))
    assert result["tokens_per_second"] == pytest.approx(20 / result["seconds"])

    code, out, err = replayssm(*args, "--no-replay")
    assert code == 0, err
    without = json.loads(out)
    assert without["token_ids"] == result["token_ids"]
    assert (without["ring_len"], without["backend"], without["flushes"]) == (1, "transformers", 19)


def test_the_first_bundled_model_is_the_default(replayssm):
    code, out, err = replayssm("generate", "--prompt", PROMPT, "--max-new-tokens", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["model"] == NAMES[0]


def test_a_model_folder_works_like_its_bundled_name(replayssm, folder):
    args = ("generate", "--prompt", PROMPT, "--max-new-tokens", "8", "--json", "--model")
    by_folder, by_name = json.loads(replayssm(*args, folder)[1]), json.loads(replayssm(*args, NAMES[0])[1])
    assert by_folder["token_ids"] == by_name["token_ids"]


@pytest.mark.parametrize("extra", [(), ("--no-replay",)], ids=["replay", "no replay"])
def test_streamed_text_is_the_text(replayssm, extra):
    args = ("generate", "--prompt", PROMPT, "--max-new-tokens", "40", *extra)
    plain, streamed = replayssm(*args), replayssm(*args, "--stream")
    assert plain[0] == streamed[0] == 0
    assert plain[1] == streamed[1]
    assert "flushes" in plain[2]


def test_characters_of_several_tokens_are_streamed_whole():
    loaded = load_model(NAMES[0])
    from replayssm.cli.upstream import Clock

    text = "naïve – 日本語 🙂 end"
    pieces: list[str] = []
    clock = Clock(loaded.tokenizer, 0, pieces.append)
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][0]
    for i in range(len(ids)):
        clock.put(ids[i : i + 1])
    clock.end()
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_prompt_can_come_from_standard_input():
    done = subprocess.run(
        [sys.executable, "-m", "replayssm", "generate", "--prompt", "-", "--max-new-tokens", "3", "--json"],
        input=PROMPT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["prompt_tokens"] >= 1


def test_a_seed_makes_sampling_repeatable(replayssm):
    args = ("generate", "--prompt", PROMPT, "--max-new-tokens", "30", "--temperature", "1.0", "--ignore-eos", "--json")
    first, again, *others = (json.loads(replayssm(*args, "--seed", s)[1])["token_ids"] for s in (1, 1, 2, 3))
    assert first == again
    assert any(other != first for other in others)
    nucleus = json.loads(replayssm(*args, "--seed", "1", "--top-p", "0.5", "--top-k", "3", "--no-replay")[1])
    with_replay = json.loads(replayssm(*args, "--seed", "1", "--top-p", "0.5", "--top-k", "3")[1])
    assert with_replay["token_ids"] == nucleus["token_ids"]


def test_chat_applies_the_template(replayssm):
    args = ("generate", "--prompt", "hello", "--max-new-tokens", "4", "--json")
    plain, chat = json.loads(replayssm(*args)[1]), json.loads(replayssm(*args, "--chat")[1])
    assert chat["prompt_tokens"] > plain["prompt_tokens"]


def test_a_failing_chat_template_is_one_line_and_exit_2(replayssm, folder):
    path = folder / "tokenizer_config.json"
    template = "{{ raise_exception('no system message') }}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    result = replayssm("generate", "--prompt", PROMPT, "--chat", "--model", folder)
    expect_one_line(result, "the chat template of model", "fails: no system message")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_dtypes_of_model_and_state(replayssm, dtype):
    state_dtype = "float32" if dtype == "auto" else dtype
    code, out, err = replayssm(
        "generate", "--prompt", PROMPT, "--max-new-tokens", "20", "--ignore-eos", "--dtype", dtype,
        "--state-dtype", state_dtype, "--ring-dtype", "auto", "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result["dtype"] == ("float32" if dtype == "auto" else dtype)
    assert result["state_dtype"] == state_dtype


def test_generation_leaves_the_model_as_it_was():
    loaded = load_model(NAMES[0])
    defaults = loaded.model.generation_config
    options = GenerateOptions(max_new_tokens=5)
    before = generate(loaded, PROMPT, options)
    assert loaded.model.generation_config is defaults
    assert generate(loaded, PROMPT, options).token_ids == before.token_ids


# --- bad input


def expect_one_line(result, *parts):
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--ring-len", "0"), ("ring-len is 0", "from 1 to")),
        (("--ring-len", "-4"), ("ring-len is -4", "from 1 to")),
        (("--ring-len", "many"), ("--ring-len", "'many'", "whole number")),
        (("--ring-len", "99999999999"), ("ring-len is 99999999999", "from 1 to")),
        (("--ring-len", "1.5"), ("--ring-len", "'1.5'", "whole number")),
        (("--top-p", "half"), ("--top-p", "'half'", "number")),
        (("--max-new-tokens", "-1"), ("max-new-tokens is -1", "at least 1")),
        (("--max-new-tokens", "0"), ("max-new-tokens is 0", "at least 1")),
        (("--dtype", "int4"), ("dtype is 'int4'", "bfloat16")),
        (("--state-dtype", "float8"), ("state-dtype is 'float8'", "float32")),
        (("--ring-dtype", "float8"), ("ring-dtype is 'float8'", "auto")),
        (("--ring-dtype", "float16"), ("ring-dtype is 'float16'", "beside a float32 model")),
        (("--backend", "metal"), ("backend is 'metal'", "torch")),
        (("--backend", "cuda"), ("backend 'cuda' is not available", "torch")),
        (("--device", "tpu"), ("device is 'tpu'", "cpu")),
        (("--temperature", "-0.5"), ("temperature is -0.5", "0 (greedy)")),
        (("--temperature", "nan"), ("temperature is nan",)),
        (("--temperature", "inf"), ("temperature is inf",)),
        (("--temperature", "1e-320"), ("temperature is 1e-320", "0 (greedy) or at least")),
        (("--top-p", "0"), ("top-p is 0", "above 0")),
        (("--top-p", "1.5"), ("top-p is 1.5", "at most 1")),
        (("--top-k", "-2"), ("top-k is -2", "at least 0")),
        (("--seed", "-2"), ("seed is -2",)),
        (("--stream", "--json"), ("--stream and --json",)),
        (("--no-such-option",), ("--no-such-option",)),
        (("--model", "no-such-model"), ("'no-such-model'", NAMES[0])),
        (("--model", ""), ("''", NAMES[0])),
        (("--model", "~no-such-user/model"), ("~no-such-user", NAMES[0])),
        (("--model", "long" * 2000), ("neither a folder nor", NAMES[0])),
        (("--model", "Owner/Model-4B"), ("neither a folder nor", "`hf download Owner/Model-4B --local-dir FOLDER`")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_bad_option_is_one_line_and_exit_2(replayssm, args, parts):
    expect_one_line(replayssm("generate", "--prompt", PROMPT, *args), *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("backend", "part"), [("auto", "GPU"), ("torch", "GPU"), ("triton", "GPU"), ("cpu", "for tensors on a CPU")]
)
def test_a_gpu_that_is_not_there_is_one_line_and_exit_2(replayssm, backend, part):
    args = ("generate", "--prompt", PROMPT, "--device", "cuda", "--backend", backend)
    expect_one_line(replayssm(*args), part)


def test_triton_without_a_gpu_is_one_line_and_exit_2(replayssm, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    args = ("generate", "--prompt", PROMPT, "--device", "cpu", "--backend", "triton")
    expect_one_line(replayssm(*args), "backend 'triton' is not available", "GPU", "torch")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading a model's weights fails."""

    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("replayssm.loading.load_model", load)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", [("generate", "--prompt", PROMPT), ("chat",), ("serve",)])
@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--backend", "cpu", "--device", "cuda"), "for tensors on a CPU"),
        (("--model", "kimi_linear-tiny", "--speculate", "mtp"), "a kimi_linear model has no MTP head"),
        (("--model", "without", "--speculate", "mtp"), "has no MTP weights"),
    ],
    ids=["backend", "model type", "weights"],
)
def test_what_a_folder_or_machine_lacks_is_told_before_a_model_loads(replayssm, folder, command, args, part):
    empty_weights(folder)
    expect_one_line(replayssm(*command, *(folder if arg == "without" else arg for arg in args)), part)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("extra", [(), ("--no-replay",), ("--speculate", "ngram", "--tree", "2")])
def test_more_tokens_than_the_model_was_made_for_are_refused_before_it_loads(replayssm, extra):
    result = replayssm("generate", "--prompt", "import", "--max-new-tokens", "8187", *extra)
    expect_one_line(
        result, f"the prompt has 6 tokens and max-new-tokens is 8187: {NAMES[0]} was made for 8192 together"
    )


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("generate", "--prompt", "import", "--max-new-tokens", "8187", "--chat"), "tokens and max-new-tokens is 8187"),
        (("generate", "--prompt", PROMPT, "--dtype", "bfloat16", "--ring-dtype", "float16"), "beside a bfloat16 model"),
        (("chat", "--system", "x" * 9000), f"tokens: {NAMES[0]} was made for 8192"),
        (("chat", "--system", "caf\udce9"), "system is not text at character 3"),
    ],
    ids=["chat template", "ring dtype", "system", "no text"],
)
def test_what_tokenizer_and_config_know_is_told_before_a_model_loads(replayssm, args, part):
    expect_one_line(replayssm(*args), part)


@pytest.mark.parametrize("extra", [(), ("--chat",)], ids=["text", "chat"])
def test_a_prompt_is_tokenized_once(replayssm, monkeypatch, extra):
    texts = []
    tokenize = PreTrainedTokenizerFast.__call__

    def noted(self, text, *args, **kwargs):
        texts.append(text)
        return tokenize(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", noted)
    code, _, _ = replayssm("generate", "--prompt", PROMPT, "--max-new-tokens", "1", *extra)
    assert (code, len(texts)) == (0, 1)


@pytest.mark.usefixtures("no_weights")
def test_a_draft_model_with_other_tokens_is_told_before_a_model_loads(replayssm, folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    args = ("generate", "--prompt", PROMPT, "--speculate", "draft", "--draft-model", folder)
    expect_one_line(replayssm(*args), "the draft model has another vocabulary")


@pytest.mark.usefixtures("no_weights")
def test_a_model_without_a_chat_template_is_told_before_it_loads(replayssm, folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
    expect_one_line(replayssm("chat", "--model", folder), "has no chat template")
    expect_one_line(replayssm("generate", "--prompt", PROMPT, "--chat", "--model", folder), "has no chat template")


def test_a_message_that_cannot_be_answered_is_told_and_the_next_one_is_answered(replayssm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"caf\udce9\n{'x' * 9000}\nhi\n"))
    code, out, err = replayssm("chat", "--max-tokens", "4", "--temperature", "0")
    assert code == 2
    assert out.count("\n") == 1
    lost, too_long, answered = err.splitlines()
    assert lost == "the message is not text at character 3: UTF-8 is wanted"
    assert too_long.endswith("tokens and max-tokens is 1: together at most 8192 fit")
    assert answered.startswith("4 tokens in")


def test_a_message_that_begins_with_a_path_is_answered_and_an_unknown_command_explained(replayssm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/etc/hosts is what?\n/nwe\n"))
    code, out, err = replayssm("chat", "--max-tokens", "4", "--temperature", "0")
    assert code == 0
    assert out.count("\n") == 1
    answered, explained = err.splitlines()
    assert answered.startswith("4 tokens in")
    assert explained.startswith("/new begins a new chat")


def test_no_prompt_is_one_line_and_exit_2(replayssm):
    expect_one_line(replayssm("generate"), "--prompt")
    expect_one_line(replayssm("generate", "--prompt", ""), "prompt is empty")
    expect_one_line(replayssm("generate", "--prompt", "caf\udce9"), "not text at character 3")


def test_closed_standard_streams(replayssm, monkeypatch):
    """As in `replayssm generate <&-` and `>&-`."""
    monkeypatch.setattr(sys, "stdin", None)
    expect_one_line(replayssm("generate", "--prompt", "-"), "standard input, which is closed")
    monkeypatch.setattr(sys, "stdout", None)
    code, out, err = replayssm("generate", "--prompt", PROMPT, "--max-new-tokens", "2", "--stream")
    assert (code, out) == (0, "")
    assert "2 tokens in" in err


def test_characters_that_standard_output_lacks_are_replaced(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("replayssm.cli.app.run", lambda: out.write("日本 é"))
    with pytest.raises(SystemExit):
        cli.main()
    assert out.buffer.getvalue() == "?? é".encode("latin-1")


def test_an_unknown_command_is_one_line_and_exit_2(replayssm):
    expect_one_line(replayssm("train"), "train")


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_nothing_but(name):
    return lambda folder: (folder / name).unlink()


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_to_five_bytes(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5])


def not_safetensors(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 9) + b"not json!" + bytes(20))


def header_is_a_list(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def header_with(offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    return lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def header_without_end(folder):
    header = b'{"a":' * 50_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def index_of(weight_map):
    def write(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN_FOLDERS = [
    (break_nothing_but("config.json"), "has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not readable JSON"),
    (lambda f: (f / "config.json").write_text("[1]"), "an object is wanted"),
    (lambda f: (f / "config.json").write_text("{}"), "has no model_type"),
    (lambda f: rewrite_config(f, model_type="llama"), "model type 'llama' is not supported"),
    (lambda f: rewrite_config(f, model_type="jamba"), "model type 'jamba' is not supported"),
    (break_nothing_but("model.safetensors"), "has no weights"),
    (only_pickle, "pickle weights only (pytorch_model.bin)"),
    (cut_off, "is cut off"),
    (cut_to_five_bytes, "is cut off"),
    (not_safetensors, "not a safetensors file"),
    (header_is_a_list, "not a safetensors file"),
    (header_with(["0", "4"]), "its header cannot be read (unsupported operand"),
    (header_with([0]), "its header cannot be read (list index"),
    (header_without_end, "its header cannot be read (maximum recursion"),
    (missing_shard, "lacks 2 of 2 weight files"),
    (index_of({}), "has no weight_map"),
    (index_of({"a": ["file"]}), "has a weight_map with values of other kinds"),
    (index_of({"a": None, "b": "file"}), "has a weight_map with values of other kinds than"),
    (lambda f: (f / "config.json").write_text("[" * 50_000), "not readable JSON (maximum recursion"),
    (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
]


@pytest.mark.parametrize(("break_folder", "part"), BROKEN_FOLDERS, ids=[part for _, part in BROKEN_FOLDERS])
def test_a_broken_folder_is_one_line_and_exit_2(replayssm, folder, break_folder, part):
    break_folder(folder)
    expect_one_line(replayssm("generate", "--prompt", PROMPT, "--model", folder), part)


def test_a_file_instead_of_a_folder_is_one_line_and_exit_2(replayssm, folder):
    expect_one_line(replayssm("generate", "--prompt", PROMPT, "--model", folder / "config.json"), "is a file")


LATE_BREAK_NAMES = ["no tensors", "other sizes", "too large", "no number", "too few layers", "tokenizer", "end of text"]
LATE_BREAKS = [
    (empty_weights, "the weights in"),
    (lambda f: rewrite_config(f, hidden_size=48), "embed_tokens.weight: [272, 192], [272, 48] is wanted"),
    (lambda f: rewrite_config(f, intermediate_size=10**12), "the model in"),
    (lambda f: rewrite_config(f, hidden_size="wide"), "the config in"),
    (lambda f: rewrite_config(f, layer_types=["linear_attention"]), "the config in"),
    (lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'), "tokenizer in"),
    (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "end"}'), "eos_token_id"),
]


@pytest.mark.parametrize(("break_folder", "part"), LATE_BREAKS, ids=LATE_BREAK_NAMES)
def test_what_only_loading_finds_is_one_line_too(replayssm, folder, break_folder, part):
    break_folder(folder)
    expect_one_line(replayssm("generate", "--prompt", PROMPT, "--model", folder), part)


@pytest.mark.parametrize("extra", [(), ("--no-replay",)], ids=["replay", "no replay"])
def test_a_served_model_type_without_recurrent_layers_is_one_line(replayssm, tmp_path, extra):
    from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "shared_intermediate_size": 32}
    config = GraniteMoeHybridConfig(
        **sizes, vocab_size=300, num_hidden_layers=1, layer_types=["attention"], mamba_n_heads=2, num_local_experts=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled.path(NAMES[0]) / name, tmp_path)
    expect_one_line(replayssm("generate", "--prompt", PROMPT, "--model", tmp_path, *extra), "not supported")


def test_bad_input_is_refused_before_torch_is_imported():
    code = (
        "import sys; from replayssm import cli; "
        "code = cli.run(['generate', '--prompt', 'x', '--ring-len', '0']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]


def test_an_internal_error_is_not_hidden(replayssm, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("replayssm.loading.load_model", broken)
    code, out, err = replayssm("generate", "--prompt", PROMPT)
    assert (code, out) == (1, "")
    assert "internal error" in err
    assert "RuntimeError: a fault of ours" in err
    monkeypatch.setenv("REPLAYSSM_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.run(["generate", "--prompt", PROMPT])


# --- doctor and the rest


def test_doctor_json_tells_what_runs_here(replayssm):
    code, out, err = replayssm("doctor", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["ok"] is True
    assert report["bundled_models"] == list(NAMES)
    assert report["chosen_backend"] == ops.resolve_backend("auto")
    backends = {b["name"]: b for b in report["backends"]}
    assert backends.keys() == {"cpu", "torch", "triton", "cuda"}
    assert backends["torch"]["available"]
    assert report["torch"]["version"]
    assert report["gpu"]["available"] or report["gpu"]["reason"]
    optional = {p["name"]: p for p in report["optional_packages"]}
    assert optional.keys() >= {"flash-linear-attention", "mamba-ssm", "cuda-core", "fastapi"}
    assert optional["llguidance"]["version"]
    assert "JSON schemas" in optional["llguidance"]["effect"]
    assert not any("not installed" in p["effect"] for p in optional.values() if p["version"])


def test_doctor_prints_the_same_for_people(replayssm):
    code, out, _ = replayssm("doctor")
    assert code == 0
    for part in ("torch", "transformers", "bundled models", NAMES[0], "chosen by auto"):
        assert part in out


@pytest.mark.parametrize(
    ("version", "inside"),
    [("5.16.9", False), ("5.17.0", True), ("5.24.0", True), ("5.24.1.dev0", True), ("5.25.0", False), ("6.0", False)],
)
def test_the_supported_range_of_transformers(version, inside):
    from replayssm.cli.doctor import TRANSFORMERS, _judge

    part = _judge("transformers", version, TRANSFORMERS, needed=True)
    assert part.ok is inside
    assert ("outside" in part.note) is not inside


def test_doctor_fails_where_a_needed_part_is_missing(replayssm, monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version

    def version(name):
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, out, _ = replayssm("doctor", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    assert "not installed" in report["transformers"]["note"]


def test_demo_shows_equal_tokens(replayssm):
    code, out, err = replayssm("demo", "--max-new-tokens", "33", "--ring-len", "8")
    assert code == 0, err
    assert out.count("equal") >= len(NAMES)
    assert "The tokens with replay equal those of step-by-step decoding." in out


def test_demo_fails_when_tokens_differ(replayssm, monkeypatch):
    from replayssm.cli import demo

    real = demo.generate

    def wrong(loaded, prompt, options):
        result = real(loaded, prompt, options)
        return result if not options.replay else result.model_copy(update={"token_ids": [0] * 4})

    monkeypatch.setattr(demo, "generate", wrong)
    code, out, _ = replayssm("demo", "--max-new-tokens", "4")
    assert code == 1
    assert "FAILED" in out


def test_version(replayssm):
    code, out, _ = replayssm("--version")
    assert code == 0
    assert out.startswith("replayssm 0.")


def test_model_types_are_those_of_twelve_families():
    """What the command line takes, what the error of `enable` lists, and what the tests build are the same models."""
    from families import FAMILIES as BUILT
    from families import build

    from replayssm.models.support import SUPPORTED_MODELS

    assert len(FAMILIES) == 12
    assert SUPPORTED_MODELS.replace(" and ", ", ").split(", ") == list(FAMILIES)
    built = {build(name).config.model_type for name in BUILT}
    assert built <= MODEL_TYPES
    for names in FAMILIES.values():
        assert built & set(names)
