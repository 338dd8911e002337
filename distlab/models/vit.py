"""Vision transformers: ViT-S/16, ViT-B/16, and a narrow one for small images.

The names of the parameters are torchvision's, so that its weights load.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words (arXiv 2010.11929), section
3.1 and table 1; Touvron et al., DeiT (arXiv 2012.12877), table 1, for the small one.
Symbols: N images, P patches in each, C channels, H heads of D = C / H.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

EPS = 1e-6  # of all norms, as in torchvision


class SelfAttention(nn.Module):
    """Each token looks at all tokens, once per head; nn.MultiheadAttention's names."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, P, C) to (N, P, C)."""
        three = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        three = three.unflatten(2, (3, self.num_heads, -1))  # (N, P, 3, H, D)
        q, k, v = three.permute(2, 0, 3, 1, 4)  # each (N, H, P, D)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return projected


class EncoderBlock(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, eps=EPS)
        self.self_attention = SelfAttention(dim, num_heads)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(dim, eps=EPS)
        up, down = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.mlp = nn.Sequential(
            up, nn.GELU(), nn.Dropout(dropout), down, nn.Dropout(dropout)
        )
        for layer in (up, down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(N, P, C) to (N, P, C)."""
        x = x + self.dropout(self.self_attention(self.ln_1(x)))
        mixed: Tensor = x + self.mlp(self.ln_2(x))
        return mixed


class Encoder(nn.Module):
    """Adds the positions, then the blocks, then a norm."""

    def __init__(
        self,
        num_tokens: int,
        num_layers: int,
        num_heads: int,
        dim: int,
        mlp_dim: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, num_tokens, dim))
        nn.init.normal_(self.pos_embedding, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            OrderedDict(
                (f"encoder_layer_{i}", EncoderBlock(dim, num_heads, mlp_dim, dropout))
                for i in range(num_layers)
            )
        )
        self.ln = nn.LayerNorm(dim, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(N, P, C) to (N, P, C)."""
        encoded: Tensor = self.ln(self.layers(self.dropout(x + self.pos_embedding)))
        return encoded


class VisionTransformer(nn.Module):
    """(N, in_channels, image_size, image_size) to (N, num_classes).

    Raises:
        ValueError: patches do not fill the image, or heads do not divide the channels;
            in forward(), images of another size.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        num_layers: int = 12,
        num_heads: int,
        dim: int,
        mlp_dim: int,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        if image_size % patch_size:
            raise ValueError(
                f"patches of {patch_size} × {patch_size} do not fill an image of "
                f"{image_size} × {image_size}"
            )
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels")
        super().__init__()
        self.image_size = image_size
        self.conv_proj = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        num_tokens = (image_size // patch_size) ** 2 + 1  # the class token is one
        self.encoder = Encoder(num_tokens, num_layers, num_heads, dim, mlp_dim, dropout)
        head = nn.Linear(dim, num_classes)
        self.heads = nn.Sequential(OrderedDict(head=head))
        fan_in = in_channels * patch_size**2
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / fan_in))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if self.conv_proj.bias is not None:
            nn.init.zeros_(self.conv_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"this ViT was made for {self.image_size} × {self.image_size} pixels, "
                f"not {x.shape[-2]} × {x.shape[-1]}"
            )
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)  # (N, P, C)
        token = self.class_token.expand(len(x), -1, -1)
        encoded = self.encoder(torch.cat([token, tokens], 1))
        scores: Tensor = self.heads(encoded[:, 0])
        return scores


def vit_s_16(num_classes: int = 1000, in_channels: int = 3) -> VisionTransformer:
    """22,050,664 parameters with 1,000 classes; images of 224 × 224."""
    return VisionTransformer(
        num_heads=6,
        dim=384,
        mlp_dim=1536,
        num_classes=num_classes,
        in_channels=in_channels,
    )


def vit_b_16(num_classes: int = 1000, in_channels: int = 3) -> VisionTransformer:
    """86,567,656 parameters with 1,000 classes; images of 224 × 224."""
    return VisionTransformer(
        num_heads=12,
        dim=768,
        mlp_dim=3072,
        num_classes=num_classes,
        in_channels=in_channels,
    )


def narrow_vit(
    num_classes: int = 10, in_channels: int = 1, image_size: int = 28
) -> VisionTransformer:
    """16 patches, 4 layers, 4 heads of 16 channels; image_size is a multiple of 4."""
    return VisionTransformer(
        image_size=image_size,
        patch_size=image_size // 4,
        num_layers=4,
        num_heads=4,
        dim=64,
        mlp_dim=128,
        num_classes=num_classes,
        in_channels=in_channels,
    )
