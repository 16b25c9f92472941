"""linnet.hf: models of linnet.nn in transformers, and back in the runtime."""

import json
import subprocess

import numpy
import pytest
import torch
import transformers
from runtime_cases import BUILD, runtime, save_tokenizer
from test_nn_models import CASES, VOCABULARY, difference, model_of
from test_nn_models import ids_of as any_ids

import linnet.nn
from linnet.hf import Cache, LinnetConfig, LinnetForCausalLM, LinnetForSequenceClassification, LinnetModel

NAMES = ["gated_deltanet", "mamba2", "softmax_attention", "hybrid", "window", "post", "positions"]


def ids_of(count, rows=1):
    return any_ids(count, rows).clamp(min=1)  # 0 is padding


def saved(name, folder):
    model = model_of(name)
    model.save(folder)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_auto_classes_read_what_linnet_nn_saved(name, tmp_path):
    model, ids = saved(name, tmp_path), ids_of(17, 2)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(ours, LinnetForCausalLM)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids))
        assert torch.equal(transformers.AutoModel.from_pretrained(tmp_path).eval()(ids).last_hidden_state, model.hidden(ids))


@pytest.mark.parametrize("name", NAMES)
def test_the_runtime_reads_what_transformers_saved(name, tmp_path):
    torch.manual_seed(0)
    config = {key: value for key, value in CASES[name].items() if key != "model_type"}
    model = LinnetForCausalLM(LinnetConfig(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["linnet"] == CASES[name]["linnet"]
    ids = ids_of(17)
    ours = runtime.load(tmp_path, weights="f32")
    assert difference(ours.logits(ids[0].tolist()), model(ids).logits) < 1e-4
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    session, tokens = ours.start(), []
    logits = session.prefill(ids[0].tolist())
    for _ in range(12):
        tokens.append(int(numpy.argmax(logits)))
        logits = session.decode(tokens[-1])
    assert out[0, 17:].tolist() == tokens
    with torch.no_grad():
        assert torch.equal(linnet.nn.Model.load(tmp_path)(ids), model(ids).logits)


def test_linnet_generate_and_generate_give_the_same_greedy_text(tmp_path):
    torch.manual_seed(2)
    model = LinnetForCausalLM(LinnetConfig(300, 16, CASES["hybrid"]["linnet"])).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    words = ["generate", tmp_path, "--prompt", "the linnet", "--tokens", "20", "--weights", "f32", "--json"]
    run = subprocess.run([BUILD / "linnet", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ids = tokenizer("the linnet", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert json.loads(run.stdout)["tokens"] == out[0, ids.shape[1] :].tolist()
    assert json.loads(run.stdout)["text"] == tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generation_with_and_without_a_state(name, how, tmp_path):
    saved(name, tmp_path)
    model = LinnetForCausalLM.from_pretrained(tmp_path).eval()
    ids = ids_of(9, 2)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(model.generate(ids, use_cache=use_cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padding_changes_nothing(name, beams, tmp_path):
    saved(name, tmp_path)
    model = LinnetForCausalLM.from_pretrained(tmp_path).eval()
    ids = ids_of(9, 2)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    short = model.generate(ids[:1, 4:], **options)[0, 5:]
    long = model.generate(ids[1:], **options)[0, 9:]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    batch = model.generate(ids, attention_mask=mask, **options)[:, 9:]
    assert torch.equal(batch, torch.stack([short, long]))


def test_a_conversation_goes_on_with_its_cache(tmp_path):
    saved("hybrid", tmp_path)
    model = LinnetForCausalLM.from_pretrained(tmp_path).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = ids_of(9)
    first = model.generate(ids, max_new_tokens=6, return_dict_in_generate=True, **options)
    assert isinstance(first.past_key_values, Cache) and first.past_key_values.get_seq_length() == 14
    longer = torch.cat([first.sequences, ids_of(4)], 1)
    again = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=6, **options)
    assert torch.equal(again, model.generate(longer, max_new_tokens=6, **options))


def test_training_packing_and_checkpointing(tmp_path):
    saved("hybrid", tmp_path)
    model, ids = LinnetForCausalLM.from_pretrained(tmp_path).train(), ids_of(12, 2)
    loss = model(ids, labels=ids).loss
    loss.backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])
    model.eval()
    with torch.no_grad():
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        packed = model(ids[:1], position_ids=positions, use_cache=False).logits
        other = model(ids[:1], cu_seq_lens_q=torch.tensor([0, 5, 12])).logits
        alone = torch.cat([model(ids[:1, :5]).logits, model(ids[:1, 5:]).logits], 1)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
        assert torch.equal(packed, other)
        whole = model(ids, output_hidden_states=True)
        assert len(whole.hidden_states) == len(model.layers) + 1
        assert torch.equal(whole.hidden_states[0], model.embed_tokens(ids))
        assert torch.equal(model.logits(whole.hidden_states[-1]), whole.logits)
        assert torch.equal(whole.hidden_states[1], model.layers[0](model.embed_tokens(ids)))
        with pytest.warns(UserWarning, match="attention weights are never formed"):
            model(ids, output_attentions=True)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        assert torch.equal(embedded, model(ids).logits)


def test_trainer_trains(tmp_path):
    torch.manual_seed(0)
    model = LinnetForCausalLM(LinnetConfig(VOCABULARY, 16, CASES["deltanet"]["linnet"]))
    data = [{"input_ids": row, "labels": row} for row in ids_of(16, 8)]
    arguments = transformers.TrainingArguments(tmp_path, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
                                               use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_classification(side, tmp_path):
    torch.manual_seed(0)
    config = LinnetConfig(VOCABULARY, 16, CASES["gated_deltanet"]["linnet"], num_labels=3, pad_token_id=0)
    model = LinnetForSequenceClassification(config).eval()
    ids = ids_of(9, 2)
    padded = ids.clone()
    if side == "left":
        padded[0, :3], alone = 0, ids[:1, 3:]
    else:
        padded[0, 6:], alone = 0, ids[:1, :6]
    out = model(padded, labels=torch.tensor([0, 2]))
    torch.testing.assert_close(out.logits[:1], model(alone).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2])))
    out.loss.backward()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(padded).logits, model(padded).logits)


def test_initial_values_are_those_of_linnet_nn():
    theirs = LinnetForCausalLM(LinnetConfig(VOCABULARY, 16, CASES["mamba2"]["linnet"]))
    ours = linnet.nn.Model(CASES["mamba2"])
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]
    for name, each in theirs.named_parameters():
        if name.endswith("A_log"):
            assert (each > -14).all() and (each <= 2.78).all()  # log of a number up to 16
        elif name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(each)
            assert (step >= 1e-4).all() and (step <= 0.101).all()
        elif each.ndim == 2 and "conv1d" not in name:
            assert 0.015 < each.std() < 0.2, name
    assert LinnetModel(theirs.config).lm_head is None
