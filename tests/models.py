"""Small, ordinary models that test the whole compiler.

Sizes differ wherever they can, so that one dim cannot be mistaken for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

Inputs = Mapping[str, Tensor]

BATCH, SEQUENCE, HIDDEN, FEED_FORWARD, HEADS, VOCABULARY = 8, 6, 32, 48, 4, 40


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Args:
        build: takes a dropout probability and makes the model in float32 with random parameters.
        inputs: makes a batch as keyword arguments.
        column: maps globs of weights whose output features tensor parallelism cuts, and of their biases, to the dim
            that it cuts.
        row: maps globs of weights whose input features it cuts to the dim.
        whole: globs of modules whose results tensor parallelism keeps whole over its axis.
        has_dropout: whether ``build`` uses its argument.
        dtypes: the dtypes in which the model runs.
    """

    build: Callable[[float], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    column: Mapping[str, int] = field(default_factory=dict)
    row: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    has_dropout: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    def made(self, dtype: torch.dtype, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model in training mode and a batch; both are the same each time."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.build(dropout)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # zero biases and unit scales would hide errors
                nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)
        inputs = {k: t.to(dtype) if t.is_floating_point() else t for k, t in self.inputs().items()}
        return model.to(dtype).train(), inputs


def token_ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))


def labels_of(ids: Tensor) -> Tensor:
    """Return ids as labels of which a different number in each sequence is ignored."""
    return ids.masked_fill(torch.rand(ids.shape) < torch.linspace(0.1, 0.6, len(ids))[:, None], -100)


def language() -> dict[str, Tensor]:
    ids = token_ids()
    return {"input_ids": ids, "labels": labels_of(ids)}


def padded_language() -> dict[str, Tensor]:
    """Return a batch of sequences of different lengths, padded at the end."""
    lengths = torch.arange(BATCH) % 3 + SEQUENCE - 2
    mask = (torch.arange(SEQUENCE) < lengths[:, None]).long()
    batch = language()
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 5, (BATCH,))}


class MLP(nn.Module):
    """Two pairs of column and row layers, with a loss."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, width), nn.GELU(), nn.Linear(width, 12), nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 12)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


class CNN(nn.Module):
    """A convolutional network with batch norm and pooling, which returns the cross-entropy and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(pixel_values).flatten(1))
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1), logits


class Outside(nn.Module):
    """torch's own encoder layer, of which the caller computes the loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FEED_FORWARD, dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


def gpt2(dropout: float) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_embd=HIDDEN,
            n_inner=FEED_FORWARD,
            n_head=HEADS,
            vocab_size=VOCABULARY,
            n_positions=16,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


DECODER = dict(
    hidden_size=HIDDEN,
    intermediate_size=FEED_FORWARD,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=16,
)


def llama(dropout: float) -> nn.Module:
    config = transformers.LlamaConfig(**DECODER, num_hidden_layers=2, attention_dropout=dropout)
    return transformers.LlamaForCausalLM(config)


def mixtral(dropout: float, experts: str = "grouped_mm") -> nn.Module:
    config = transformers.MixtralConfig(
        **DECODER,
        num_hidden_layers=1,
        attention_dropout=dropout,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation=experts,
    )
    return transformers.MixtralForCausalLM(config)


MIXTRAL = Model(
    mixtral,
    language,
    {"*.[qkv]_proj.weight": 0, "lm_head.weight": 0},
    {"*.o_proj.weight": 1, "model.embed_tokens.weight": 0},
    ("model.layers.*.self_attn",),
    has_dropout=True,
    dtypes=(torch.float32,),
)
"""Its default grouped product over the experts exists only in float32."""


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForMaskedLM(config)


def t5(dropout: float) -> nn.Module:
    config = transformers.T5Config(
        d_model=HIDDEN,
        d_ff=FEED_FORWARD,
        num_layers=1,
        num_heads=HEADS,
        d_kv=8,
        vocab_size=VOCABULARY,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(dropout: float) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        image_size=12,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.ViTForImageClassification(config)


def resnet(dropout: float) -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=5, layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


def regression() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 12), "target": torch.randn(BATCH, 12)}


DECODER_COLUMN = {"*.[qkv]_proj.weight": 0, "*.gate_proj.weight": 0, "*.up_proj.weight": 0, "lm_head.weight": 0}
DECODER_ROW = {"*.o_proj.weight": 1, "*.down_proj.weight": 1, "model.embed_tokens.weight": 0}

ZOO: dict[str, Model] = {
    "mlp": Model(
        lambda dropout: MLP(),
        regression,
        {"layers.0.*": 0, "layers.3.*": 0},
        {"layers.2.weight": 1, "layers.5.weight": 1},
        ("layers.2", "layers.5"),
    ),
    "cnn": Model(
        lambda dropout: CNN(),
        lambda: images(8),
        {"features.0.weight": 0, "features.1.*": 0},
        {"features.4.weight": 1},
        ("features.4",),
    ),
    "outside": Model(
        Outside,
        lambda: {"ids": token_ids()},
        {"layer.linear1.*": 0, "head.*": 0},
        {"layer.linear2.weight": 1, "layer.self_attn.out_proj.weight": 1, "embed.weight": 0},
        ("layer.linear2", "layer.self_attn"),
        has_dropout=True,
    ),
    "gpt2": Model(
        gpt2,
        language,
        {"*.c_attn.weight": 1, "*.c_attn.bias": 0, "*.c_fc.weight": 1, "*.c_fc.bias": 0},
        {"*.c_proj.weight": 0, "transformer.wte.weight": 0},
        ("transformer.h.*.attn", "transformer.h.*.mlp"),
        has_dropout=True,
    ),
    "llama": Model(
        llama,
        language,
        DECODER_COLUMN,
        DECODER_ROW,
        ("model.layers.*.self_attn", "model.layers.*.mlp"),
        has_dropout=True,
    ),
    "bert": Model(
        bert,
        padded_language,
        {"*.query.*": 0, "*.key.*": 0, "*.value.*": 0, "*.intermediate.dense.*": 0},
        {"*.layer.*.output.dense.weight": 1, "bert.embeddings.word_embeddings.weight": 0},
        ("bert.encoder.layer.*.attention.output.dense", "bert.encoder.layer.*.output.dense"),
        has_dropout=True,
    ),
    "t5": Model(
        t5,
        padded_language,
        {"*.[qkv].weight": 0, "*.wi.weight": 0},
        {"*.o.weight": 1, "*.wo.weight": 1, "shared.weight": 0},
        ("encoder.block.*.layer.0.SelfAttention.o", "*.DenseReluDense"),
        has_dropout=True,
    ),
    "vit": Model(
        vit,
        lambda: images(12),
        {"*.[qkv]_proj.*": 0, "*.fc1.*": 0},
        {"*.o_proj.weight": 1, "*.fc2.weight": 1},
        ("vit.layers.*.attention", "vit.layers.*.mlp"),
        has_dropout=True,
    ),
    "resnet": Model(
        resnet,
        lambda: images(16),
        {"*.layer.0.convolution.weight": 0, "*.layer.0.normalization.*": 0},
        {"*.layer.1.convolution.weight": 1},
        ("resnet.encoder.stages.*.layers.0.layer.1.convolution",),
    ),
    "mixtral": MIXTRAL,
    "mixtral_batched": replace(
        MIXTRAL, build=lambda dropout: mixtral(dropout, "batched_mm"), dtypes=(torch.float32, torch.float64)
    ),
}
