"""The equations of the Mamba-3 mixer, written out one token and one head at a time."""

import math

import torch
from torch.nn.functional import softplus


def rms(x, weight):
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def rotate(x, theta):
    x = x.clone()
    for pair, angle in enumerate(theta):
        a, b = x[2 * pair].clone(), x[2 * pair + 1].clone()
        x[2 * pair] = a * angle.cos() - b * angle.sin()
        x[2 * pair + 1] = a * angle.sin() + b * angle.cos()
    return x


def equations(mixer, x):
    """The block on one sequence x (length, hidden_size), straight from the definition of each symbol."""
    config = mixer.config
    H, P, n = config.num_heads, config.head_dim, config.state_size
    m = config.num_rope_pairs
    rows = {"z": H * P, "x": H * P, "B": n, "C": n, "dt": H, "A": H, "trap": H}
    rows["angle"] = H * m if config.rope_per_head else m
    W = dict(zip(rows, mixer.in_proj.weight.split(list(rows.values())), strict=True))
    heads = []
    for i in range(H):
        channels = slice(i * P, (i + 1) * P)
        h = mixer.h0[i] if config.initial_state == "learned" else torch.zeros(n, P, dtype=x.dtype)
        W_omega = W["angle"][i * m : (i + 1) * m] if config.rope_per_head else W["angle"]
        theta = torch.zeros(m, dtype=x.dtype)
        previous = torch.zeros(n, P, dtype=x.dtype)
        outputs = []
        for x_t in x:
            rate = W["A"][i] @ x_t + (mixer.A_bias[i] if config.gate_form == "exact" else 0)
            if config.decay_activation == "heavy_tail":
                rate = rate.clamp(min=0) + 1 / (1 + (-rate).clamp(min=0))
            else:
                rate = softplus(rate)
            a = (rate - 0.05).clamp(min=0) if config.gate_form == "exact" else rate.clamp(min=config.a_min)
            dt = softplus(W["dt"][i] @ x_t + mixer.dt_bias[i])
            d = (-a * dt).exp()
            lam = torch.sigmoid(W["trap"][i] @ x_t)
            if config.use_rope:
                speed = torch.tanh(W_omega @ x_t)
                if config.gate_form == "exact":
                    speed = speed.sign() * (speed.abs() - 0.1).clamp(min=0) / 0.9
                theta = theta + dt * math.pi * speed
            C = rotate(rms(W["C"] @ x_t, mixer.C_norm.weight) + mixer.C_bias[i, 0], theta)
            u, z = W["x"][channels] @ x_t, W["z"][channels] @ x_t
            new = d * h
            if config.reflection_rank:
                k = mixer.k_proj.weight[i * n : (i + 1) * n] @ x_t
                k = rotate(k / k.norm(), theta)
                gate = torch.sigmoid(mixer.beta_proj.weight[i] @ x_t + mixer.beta_proj.bias[i])
                beta = (2.2 * gate - 0.1).clamp(0, 2) if config.gate_form == "exact" else 2 * gate
                strength = d * beta if config.reflection_form == "contractive" else beta
                new = new - strength * torch.outer(k, k @ h)
            if config.injection == "delta":
                new = new + beta * torch.outer(k, u)
            elif config.injection == "overwrite":
                new = new + beta * (2 - beta) * torch.outer(k, u)
            else:
                B = rotate(rms(W["B"] @ x_t, mixer.B_norm.weight) + mixer.B_bias[i, 0], theta)
                new = new + lam * dt * torch.outer(B, u) + (1 - lam) * dt * d * previous
                previous = torch.outer(B, u)
            h = new
            y = C @ h + mixer.D[i] * u
            if config.output_norm:
                y = rms(y, mixer.norm.weight[channels])
            outputs.append(y * z * torch.sigmoid(z))
        heads.append(torch.stack(outputs))
    return torch.cat(heads, -1) @ mixer.out_proj.weight.T
