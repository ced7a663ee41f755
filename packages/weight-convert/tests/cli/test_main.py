import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weight_convert.cli import main
from weight_convert.files import read_catalog


def test_help_imports_neither_torch_nor_safetensors() -> None:
    code = (
        "import sys; from weight_convert.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "convert" in done.stdout
    assert "verify" in done.stdout
    assert "inspect" in done.stdout


def test_there_and_back_on_the_command_line(
    oracle: Any, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(model.write(tmp_path / "a", "transformers", num_files=3))
    b, c = str(tmp_path / "b"), str(tmp_path / "c")
    assert main(["convert", a, b, "--to", "fused", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "dry run, nothing written" in dry
    assert not (tmp_path / "b").exists()
    assert main(["convert", a, b, "--to", "fused"]) == 0
    wet = capsys.readouterr().out
    told = [line for line in dry.splitlines() if "bytes of memory at the peak" not in line]
    assert len(told) == len(dry.splitlines()) - 1 and told[:-1] == wet.splitlines()[:-1]
    assert "2 of 12 tensors regrouped" in wet
    assert main(["convert", b, c, "--to", "transformers", "--max-shard-size", "1KB"]) == 0
    assert oracle.read_folder(tmp_path / "c") == model.per_expert, model.seed
    assert main(["verify", a, c]) == 0
    assert "equal: 46 tensors" in capsys.readouterr().out
    assert main(["inspect", c]) == 0
    shown = capsys.readouterr().out
    assert "format      transformers" in shown
    assert "MoE layers  1, 12 experts each" in shown
    assert "problem     none" in shown


def test_the_last_line_counts_the_tensors_that_are_transposed(
    oracle: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    src = oracle.make_model().write(tmp_path / "src", "transformers")
    assert main(["convert", str(src), str(tmp_path / "dst"), "--to", "paddle"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    before, after = (read_catalog(folder).tensors for folder in (src, tmp_path / "dst"))
    num_transposed = sum(after[key].shape != tensor.shape for key, tensor in before.items())
    assert 0 < num_transposed < len(after)  # no dims are alike
    assert f"0 of {len(after)} tensors regrouped, {num_transposed} computed or trans" in last


def test_what_already_has_the_form_is_said_so(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(model.write(tmp_path / "a", "fused"))
    assert main(["convert", a, str(tmp_path / "b"), "--to", "fused"]) == 0
    assert "the tensors already were as in fused" in capsys.readouterr().out


def test_differences_are_listed_and_the_status_is_1(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(model.write(tmp_path / "a", "transformers"))
    for key in [key for key in model.per_expert if "up_proj" in key or "down_proj" in key]:
        model.per_expert[key] = ("U8", (0,), b"")
    b = str(model.write(tmp_path / "b", "transformers"))
    assert main(["verify", a, b]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2] == "... and 6 more"
    assert shown[-1].startswith("26 differ: 46 tensors")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "{tmp}/absent", "{tmp}/b", "--to", "fused"], "absent is not a directory"),
        (["convert", "{tmp}/a", "{tmp}/a", "--to", "fused"], "exists; choose another target"),
        (
            ["convert", "{tmp}/a", "{tmp}/b", "--to", "fused", "--model-type", "gpt_oss"],
            "'gpt_oss' was asked for, but",
        ),
        (["verify", "{tmp}/a", "{tmp}"], "has no weights that are read here"),
        (["inspect", "{tmp}/absent"], "absent is not a directory"),
        (["inspect", "{tmp}"], "has no weights that are read here"),
        (["specs", "mixtrl"], "did you mean 'mixtral'?"),
        (["verify", "{tmp}/a", "{tmp}/a", "--spec", "x", "--model-type", "y"], "give one of them"),
        (["convert", "{tmp}/a", "{tmp}/b", "--to", "bin"], "qwen3_moe has no format 'bin'"),
        (["convert", "{tmp}/a", "/dev/null/b", "--to", "fused"], "/dev/null"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    model.write(tmp_path / "a", "transformers")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weight-convert: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert os.listdir(tmp_path) == ["a"]


def test_unknown_tensors_are_named_and_refused_on_demand(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(model.write(tmp_path / "a", "transformers"))
    (tmp_path / "a" / ".hidden").touch()
    assert main(["convert", a, str(tmp_path / "b"), "--to", "fused"]) == 0
    shown = capsys.readouterr()
    assert "left out: .hidden (hidden)" in shown.out
    assert "carried as they are: 3 tensors without a name in the spec: model." in shown.out
    assert shown.err == ""
    refused = ["convert", a, str(tmp_path / "c"), "--to", "fused", "--unknown", "refuse"]
    assert main(refused) == 2
    assert "3 tensors are not named by the spec" in capsys.readouterr().err


def test_a_family_of_ones_own_converts(
    oracle: Any, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["specs", "qwen3_moe"]) == 0
    text = capsys.readouterr().out.replace('"qwen3_moe"', '"mine"')
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace("proof =", "# proof ="))
    a = model.write(tmp_path / "a", "fused")
    (a / "config.json").write_text('{"model_type": "mine", "num_experts": 12}')
    b = str(tmp_path / "b")
    assert main(["convert", str(a), b, "--to", "transformers", "--spec", str(mine)]) == 0
    assert "experimental: no other project's code has shown" in capsys.readouterr().out
    assert oracle.read_folder(tmp_path / "b") == model.per_expert, model.seed
    assert main(["specs", "--check", b, "--spec", str(mine)]) == 1
    shown = capsys.readouterr().out
    assert "unknown: model.mtp.unheard_of" in shown
    assert "mine, format transformers: 9 tensors named, 3 unknown, 0 in conflict" in shown


def test_families_are_listed_with_formats_and_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["specs"]) == 0
    shown = capsys.readouterr().out
    assert "mixtral        transformers        transformers' loader" in shown
    assert "gpt_oss        fused" in shown


def test_the_installed_command_answers(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("weight-convert")
    done = subprocess.run(
        [command, "inspect", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "has no weights that are read here" in done.stderr


def test_a_write_that_fails_midway_leaves_nothing_behind(model: Any, tmp_path: Path) -> None:
    model.write(tmp_path / "a", "transformers")
    code = (
        "import resource, sys; from weight_convert.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "sys.exit(main(['convert', 'a', 'b', '--to', 'fused']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert os.listdir(tmp_path) == ["a"]


def test_a_reader_that_stops_listening_is_no_error(model: Any, tmp_path: Path) -> None:
    model.write(tmp_path / "a", "transformers")
    code = "import sys; from weight_convert.cli import main; sys.exit(main(['inspect', 'a']))"
    command = f'"{sys.executable}" -c "{code}" | true'
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_a_model_is_dequantised_and_quantised_again(tmp_path: Path, capsys: Any) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "a").mkdir()
    key = "model.layers.0.self_attn.q_proj.weight"
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    tensors = {key: codes, key + "_scale_inv": torch.tensor([[0.3]])}
    save(tensors, tmp_path / "a" / "model.safetensors")
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v3", "quantization_config": entry}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["dequantize", a, b, "--dry-run"]) == 0
    assert "dry run, nothing written: 1 of 1 tensors computed" in capsys.readouterr().out
    assert main(["dequantize", a, b]) == 0
    assert main(["quantize", b, c]) == 0
    out = capsys.readouterr().out
    assert "left out: quantization.kept (the scales stand beside their weights again)" in out
    assert main(["verify", a, c]) == 0
    assert main(["quantize", a, str(tmp_path / "d")]) == 2
    assert "has no quantization.kept; choose" in capsys.readouterr().err


def test_models_are_merged_as_a_file_says(tmp_path: Path, oracle: Any, capsys: Any) -> None:
    pytest.importorskip("torch")
    model = oracle.make_model(dtype="F32")
    for name in "ab":
        model.write(tmp_path / name, "fused", num_files=2)
    models = '[[models]]\npath = "a"\n[[models]]\npath = "b"\n'
    (tmp_path / "m.toml").write_text('method = "linear"\nremove_keys = ["lm_head.*"]\n' + models)
    assert main(["merge", str(tmp_path / "m.toml"), str(tmp_path / "c")]) == 0
    assert "removed: 1 tensors of " in capsys.readouterr().out
    (tmp_path / "m.toml").write_text('method = "mean"\n' + models)
    assert main(["merge", str(tmp_path / "m.toml"), str(tmp_path / "d")]) == 2
    assert "method='mean'; expected one of linear" in capsys.readouterr().err
