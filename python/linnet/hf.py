"""Models of linnet.nn for Hugging Face transformers (5 and newer).

    from linnet.hf import LinnetConfig, LinnetForCausalLM       # also known to AutoConfig, AutoModel, AutoModelForCausalLM, ... then

    model = LinnetForCausalLM(LinnetConfig(vocab_size=256, hidden_size=128, linnet={"layers": [{"mixer": "deltanet", "options": {"heads": 2}}]}))
    model.generate(ids, max_new_tokens=20, num_beams=4)
    model.save_pretrained("folder")                             # which `linnet generate folder` runs, too

The configuration is that of docs/layers.md, "Models". Greedy and sampled generation and beams decode with a state (Cache), padding may
be on either side. Assisted generation needs a cache that can be cut, which a recurrent state cannot.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutputWithPast

from ._model import Model, Norm
from ._records import initialise
from ._state import State
from .nn import Layer


class Cache(State):
    """The state of a batch, as past_key_values: convolution states, recurrent states, keys and values."""

    is_compileable = False

    def __init__(self, rows, capacity=64):
        super().__init__(rows, capacity)
        self.columns = 0  # tokens of a row, padding included

    def get_seq_length(self, layer_idx=0):
        return self.columns

    def reorder_cache(self, beam_idx):
        self.reorder(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self.reorder([row for row in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices):
        self.reorder(indices.tolist())


class LinnetConfig(PreTrainedConfig):
    """vocab_size, hidden_size, tie_word_embeddings and `linnet`: order, norm, layers, ... of docs/layers.md, "Models"."""

    model_type = "linnet"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, vocab_size=256, hidden_size=64, linnet=None, max_position_embeddings=None, tie_word_embeddings=False,
                 use_cache=True, **others):  # fmt: skip
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.linnet = linnet if linnet is not None else {"layers": [{"mixer": "softmax_attention", "options": {"heads": 1}}]}
        self.use_cache = use_cache
        if max_position_embeddings is not None:
            self.max_position_embeddings = max_position_embeddings
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @property
    def num_hidden_layers(self):
        return sum(entry.get("repeat", 1) for entry in self.linnet["layers"])

    def to_diff_dict(self):  # the runtime needs these, whatever their defaults are here
        needed = {name: getattr(self, name) for name in ("model_type", "vocab_size", "hidden_size", "tie_word_embeddings", "linnet")}
        return {**super().to_diff_dict(), **needed}


class LinnetPreTrainedModel(PreTrainedModel):
    config_class = LinnetConfig
    base_model_prefix = ""  # tensors have the runtime's names, without a prefix
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ["Block"]
    _is_stateful = True  # a recurrent state cannot go back
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]

    build, body, hidden, logits = Model.build, Model.body, Model.hidden, Model.logits

    def __init__(self, config):
        super().__init__(config)
        self.build(config.to_dict() | {"linnet": config.linnet})
        self.gradient_checkpointing = False

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, table):
        self.embed_tokens = table

    @torch.no_grad()
    def _init_weights(self, module):
        """The initial values of linnet.nn, for what was not loaded."""
        if isinstance(module, Layer):
            for parameter in module._record()["parameters"]:
                tensor = module.get_tensor(parameter["name"])
                if not getattr(tensor, "_is_hf_initialized", False):
                    initialise(tensor, parameter["init"])
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, 0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def read(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None,
             cu_seq_lens_q=None, output_hidden_states=None, output_attentions=None, **_):  # fmt: skip
        """The hidden states of the tokens, the cache, and where they are wanted what each block read and the last norm made."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("linnet: expected input_ids or inputs_embeds, one of them")
        x = input_ids if inputs_embeds is None else inputs_embeds
        rows, tokens = x.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None and cu_seq_lens_q is None:
            past_key_values = Cache(rows)
        if attention_mask is not None:
            attention_mask = attention_mask[:, -tokens:]  # of the new tokens
        elif position_ids is not None and past_key_values is None and cu_seq_lens_q is None and rows == 1:
            starts = (position_ids[0] == 0).nonzero().flatten().tolist()  # packed: positions begin again
            cu_seq_lens_q = [*starts, tokens] if len(starts) > 1 else None
        if output_attentions:
            warnings.warn("linnet: attention weights are never formed, output_attentions gives none", stacklevel=2)
        every = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        y, states = self.hidden(x, past_key_values, cu_seq_lens_q, attention_mask, every=every), None
        if every:
            states = y.unbind(2)
            y = states[-1]
        if past_key_values is not None:
            past_key_values.columns += tokens
        return y, past_key_values, states


class LinnetModel(LinnetPreTrainedModel):
    """Without a head: the states behind the last norm."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = None
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, return_dict=True, **others):  # fmt: skip
        y, cache, states = self.read(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **others)
        result = BaseModelOutputWithPast(last_hidden_state=y, past_key_values=cache, hidden_states=states)
        return result if return_dict in (None, True) else result.to_tuple()


class LinnetForCausalLM(LinnetPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # forward makes a Cache

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, labels=None,
                use_cache=None, logits_to_keep=0, return_dict=True, **others):  # fmt: skip
        y, cache, states = self.read(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **others)
        if not isinstance(logits_to_keep, int):
            y = y[:, logits_to_keep]
        elif logits_to_keep:
            y = y[:, -logits_to_keep:]
        logits = self.logits(y)
        loss = None
        if labels is not None:
            others = {name: others[name] for name in ("num_items_in_batch", "shift_labels") if name in others}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        result = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)
        return result if return_dict in (None, True) else result.to_tuple()


class LinnetForSequenceClassification(LinnetPreTrainedModel):
    """A linear map of the last token's state; config.num_labels classes, or one number for a regression."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head, self.num_labels = None, config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, labels=None,
                use_cache=False, return_dict=True, **others):  # fmt: skip
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            attention_mask = input_ids != pad
        y, cache, states = self.read(input_ids, attention_mask, None, past_key_values, inputs_embeds, use_cache, **others)
        if attention_mask is None:
            last = y[:, -1]
        else:
            places = torch.arange(1, y.shape[1] + 1, device=y.device) * attention_mask[:, -y.shape[1] :]
            last = y[torch.arange(y.shape[0], device=y.device), places.argmax(1)]
        logits = self.score(last)
        loss = None
        if labels is not None:
            kind = self.config.problem_type or (
                "regression" if self.num_labels == 1 else
                "multi_label_classification" if labels.is_floating_point() else "single_label_classification")  # fmt: skip
            if kind == "regression":
                loss = F.mse_loss(logits.squeeze(-1).float(), labels.squeeze(-1).float() if labels.dim() > 1 else labels.float())
            elif kind == "multi_label_classification":
                loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float())
            else:
                loss = F.cross_entropy(logits.float(), labels.flatten())
        result = SequenceClassifierOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)
        return result if return_dict in (None, True) else result.to_tuple()


def register():
    """Makes the model type `linnet` known to the Auto classes."""
    AutoConfig.register("linnet", LinnetConfig, exist_ok=True)
    AutoModel.register(LinnetConfig, LinnetModel, exist_ok=True)
    AutoModelForCausalLM.register(LinnetConfig, LinnetForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(LinnetConfig, LinnetForSequenceClassification, exist_ok=True)


register()
