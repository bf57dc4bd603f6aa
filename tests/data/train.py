"""A training as someone writes it who has never heard of the tuner: `torchrun train.py deepspeed_config.json`."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

SEQ_LEN = 256


def main(config: str) -> None:
    """Three optimizer steps on the same sequences."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=8192,
            max_position_embeddings=256,
        )
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(dist.get_rank())
    shape = (engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu(), SEQ_LEN)
    for tokens in [torch.randint(0, 8192, shape)] * 3:
        losses = []
        for micro_batch in tokens:
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {engine.global_steps}: loss {sum(losses) / len(losses):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
