"""GRPO in sixty lines of code, by Gymnasium, torch and transformers; this package gives the environment and gold alone.

    python examples/gym_grpo.py

`make_vec` makes a batched environment, `num_generations` repeats each instruction, and one `step` scores the batch. The
policy is the sandbox's; any causal language model with a chat template takes its place. Printed are the surrogate's
score, which is trained on, gold, which is not, and the responses' length, of each step's own samples.
Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), without the KL to a reference.
"""

from dataclasses import dataclass

import gymnasium as gym
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

from alpacafarm_env import sandbox  # registers the environments
from alpacafarm_env.wrappers.vector import AddScore


@dataclass
class Options:
    """GRPO on AlpacaFarm-PPO-v0."""

    steps: int = 40
    batch_size: int = 64
    """Responses a step, 8 to each instruction."""
    learning_rate: float = 2e-4
    policy: str = str(sandbox.POLICY)
    seed: int = 0


def main(options: Options) -> None:
    """Trains, and prints a row a step."""
    env = AddScore(gym.make_vec("AlpacaFarm-PPO-v0", num_envs=options.batch_size, autoreset_mode="Disabled"))
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    torch.manual_seed(options.seed)
    print("step   proxy    gold  tokens")
    for step in range(1, options.steps + 1):
        seed = options.seed + options.batch_size * step  # slot i is seeded by this plus i
        instructions, _ = env.reset(seed=seed, options={"num_generations": 8})
        chats = [[{"role": "user", "content": instruction}] for instruction in instructions]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = tokenizer(texts, return_tensors="pt", padding=True)
        ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=64)
        tokens = ids[:, prompts.input_ids.shape[1] :]
        ends = (tokens == tokenizer.eos_token_id).int()
        mask = (ends.cumsum(1) - ends == 0).float()  # up to the first end, with it
        _, rewards, *_, infos = env.step(tokenizer.batch_decode(tokens, skip_special_tokens=True))

        groups = torch.tensor(rewards, dtype=torch.float32).view(-1, 8)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        seen = torch.cat([prompts.attention_mask, mask.long()], dim=1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=seen, position_ids=places).logits[:, -tokens.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        # One update a step, so the ratio to the sampler's probability is 1: it carries the gradient.
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -((ratio * advantages * mask).sum(1) / mask.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{step:4}  {rewards.mean():6.2f}  {infos['gold_reward'].mean():6.2f}  {mask.sum(1).mean():6.1f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
