"""One contender of `speed`, in a process of its own: it makes a step for each line that it is sent.

It runs in another environment too, so it imports the package, TRL and datasets only where a contender is made of them.
A contender is an iterator: each `next` makes an update of `batch` rows and gives (real tokens read, loss).
"""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, logsigmoid

Step = tuple[int, float]
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
RATE, LENGTH = 1e-4, 352
SAMPLED, NUM_SAMPLED, SHORT = 96, 64, 600
"""Tokens of a response, instructions that are answered together, and characters that they are shorter than."""


def ours(task: str, rows: list[dict[str, str]], model: str, precision: Any, batch: int) -> Iterator[Step]:
    """This package, by its default settings."""
    from alpacafarm_env import agents
    from alpacafarm_env.agents.loop import epoch_batch
    from alpacafarm_env.instructions import Demonstration, Instruction, Preference

    settings: dict[str, Any] = {"batch_size": batch, "epochs": 1, "precision": precision, "learning_rate": RATE}
    if task == "sft":
        policy = agents.LanguageModel.from_pretrained(model, lora=LoraConfig(**LORA, task_type="CAUSAL_LM"))
        demonstrations = [Demonstration(Instruction(row["instruction"]), row["chosen"]) for row in rows]
        agent: Any = agents.SFT(policy, demonstrations, config=agents.SFTConfig(**settings))
        sizes = agent._data.total_lengths
    else:
        pairs = [Preference(Instruction(row["instruction"]), (row["chosen"], row["rejected"]), 1) for row in rows]
        if task == "dpo":
            policy = agents.LanguageModel.from_pretrained(model, lora=LoraConfig(**LORA, task_type="CAUSAL_LM"))
            agent = agents.DPO(policy, pairs, config=agents.DPOConfig(**settings))
            sizes = agent._data.total_lengths.view(2, -1).sum(0)
        else:
            config = agents.RewardModelingConfig(**settings)
            agent = agents.RewardModeling(model, pairs, config=config, lora=LoraConfig(**LORA))
            sizes = torch.tensor([sum(map(len, pair)) for pair in agent._pairs])
    updates = agent.updates()
    for step in count(1):
        chosen = epoch_batch(step, num_items=len(sizes), batch_size=batch, seed=0)
        if task == "dpo":  # the others read the reference in each step, and DPO has before the first one
            with torch.no_grad(), agent._loop.processes.autocast():
                for part in agent._loop.cut(agent._sizes[chosen]):
                    agent._logprobs(torch.as_tensor(chosen)[part])
        yield int(sizes[chosen].sum()), next(updates)["loss"]


def texts(task: str, rows: list[dict[str, str]], model: str) -> tuple[Any, list[tuple[list[int], int]]]:
    """The tokenizer, and each text's tokens with the number of those of its prompt; of pairs both, in turn."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def ids(messages: list[dict[str, str]], **more: Any) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, return_dict=False, **more))

    found = []
    for row in rows:
        asked = [{"role": "user", "content": row["instruction"]}]
        prompt = len(ids(asked, add_generation_prompt=True))
        sides = ("chosen",) if task == "sft" else ("chosen", "rejected")
        conversations = [[*asked, {"role": "assistant", "content": row[side]}] for side in sides]
        found += [(ids(each)[:LENGTH], prompt) for each in conversations]
    return tokenizer, found


def plain(
    task: str, rows: list[dict[str, str]], model: str, precision: str, batch: int, *, bare: bool
) -> Iterator[Step]:
    """Transformers and peft by hand: a batch is one padded pass, as first written; with an optimizer.

    `bare`: forward and backward passes alone, of rows of like length, 1,024 tokens at a time, with logits where a
    response is: what no trainer can do without. Of pairs each text is passed through once.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer, data = texts(task, rows, model)
    scores = task == "reward"
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    loaded = kind.from_pretrained(
        model, **({"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if scores else {})
    )
    net: Any = get_peft_model(loaded, LoraConfig(**LORA, task_type="SEQ_CLS" if scores else "CAUSAL_LM"))
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=RATE)
    per_step = batch * (1 if task == "sft" else 2)

    def logprob(part: list[tuple[list[int], int]]) -> torch.Tensor:
        width = max(len(ids) for ids, _ in part)
        padded = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in part])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in part])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            if scores:
                scored: torch.Tensor = net(input_ids=padded, **({} if bare else {"attention_mask": mask})).logits
                return scored[:, 0].float()
            counts = torch.tensor([[prompt <= at + 1 < len(ids) for at in range(width)] for ids, prompt in part])
            if bare:
                head = net.get_base_model().lm_head
                handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][counts],))
                logits = net(input_ids=padded, use_cache=False).logits
                handle.remove()
            else:
                logits = net(input_ids=padded, attention_mask=mask, use_cache=False).logits[counts]
        targets = padded.roll(-1, 1)[counts]
        nats = cross_entropy(logits.float(), targets, reduction="none")
        return -torch.stack([each.sum() for each in torch.split(nats, counts.sum(1).tolist())])

    for start in range(0, len(data) - per_step + 1, per_step):
        part = data[start : start + per_step]
        num, total = sum(len(ids) - prompt for ids, prompt in part), 0.0
        if bare:
            part = sorted(part, key=lambda each: -len(each[0]))
            while part:
                size = max(1, 1024 // len(part[0][0]))
                values = -logprob(part[:size]).sum() / num
                values.backward()  # type: ignore[no-untyped-call]
                total, part = total + values.item(), part[size:]
            optimizer.zero_grad()
        else:
            values = logprob(part)
            if task == "sft":
                loss = -values.sum() / num
            else:
                reference: Any = 0.0
                if task == "dpo":
                    with torch.no_grad(), net.disable_adapter():
                        reference = logprob(part)
                margins = (values - reference).view(-1, 2) * (0.1 if task == "dpo" else 1.0)
                loss = -logsigmoid(margins[:, 0] - margins[:, 1]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total = loss.item()
        yield sum(len(ids) for ids, _ in data[start : start + per_step]), total


def sampled(_: str, rows: list[dict[str, str]], model: str, precision: Any, __: int, *, ours: bool) -> Iterator[Step]:
    """Responses of up to `SAMPLED` tokens at temperature 1: ours, or transformers' `generate` with adapters by peft."""
    from alpacafarm_env import agents
    from alpacafarm_env.agents.precision import resolve_precision
    from alpacafarm_env.instructions import Instruction

    torch.manual_seed(0)  # `generate` draws from the global generator
    adapters = LoraConfig(**LORA, task_type="CAUSAL_LM")
    policy = agents.LanguageModel.from_pretrained(model, lora=adapters, max_prompt_tokens=SHORT)
    instructions = [Instruction(row["instruction"]) for row in rows if len(row["instruction"]) < SHORT][:NUM_SAMPLED]
    policy.precision = resolve_precision(precision, policy.model)
    prompts = policy.encode_prompts(instructions)
    width = max(map(len, prompts))
    padded = torch.tensor([[policy.tokenizer.pad_token_id] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    generator, ends = torch.Generator().manual_seed(0), torch.tensor(policy.eos_token_ids)
    given: dict[str, Any] = {"input_ids": padded, "attention_mask": mask, "max_new_tokens": SAMPLED}
    given |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": list(policy.eos_token_ids)}
    given["pad_token_id"] = policy.tokenizer.pad_token_id
    while True:
        if ours:
            yield len(policy.generate(instructions, generator=generator, max_new_tokens=SAMPLED).tokens), 0.0
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            tokens = policy.model.generate(**given)[:, width:]
        ended = torch.isin(tokens, ends)
        yield int((ended.cumsum(1) - ended.int() == 0).sum()), 0.0


def trl(task: str, rows: list[dict[str, str]], model: str, precision: str, batch: int) -> Iterator[Step]:
    """TRL's trainer of the task, by its default settings; it runs in a thread that waits before each step."""
    from queue import Queue
    from threading import Thread

    import trl as library  # type: ignore[import-not-found]
    from datasets import Dataset
    from transformers import TrainerCallback

    kind = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}[task]
    sides = {"completion": "chosen"} if task == "sft" else {"chosen": "chosen", "rejected": "rejected"}
    examples = [
        {"prompt": [{"role": "user", "content": row["instruction"]}]}
        | {side: [{"role": "assistant", "content": row[name]}] for side, name in sides.items()}
        for row in rows
    ]
    config = getattr(library, f"{kind}Config")(
        output_dir="trl_out", per_device_train_batch_size=batch, num_train_epochs=9, max_length=LENGTH, report_to=[],
        logging_steps=1, use_cpu=True, save_strategy="no", bf16=precision == "bfloat16", learning_rate=RATE,
        gradient_checkpointing=False, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    go: Queue[bool] = Queue()
    done: Queue[Step] = Queue()
    seen = [0]

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.get()
            seen[0] = 0

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if logs and "loss" in logs:
                done.put((seen[0], float(logs["loss"])))

    adapter = LoraConfig(**LORA, task_type="SEQ_CLS" if task == "reward" else "CAUSAL_LM")
    trainer = getattr(library, f"{kind}Trainer")(
        model=model, args=config, train_dataset=Dataset.from_list(examples), peft_config=adapter, callbacks=[Turns()]
    )
    compute = trainer.compute_loss

    def counting(net: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += int(inputs["attention_mask"].sum())
        return compute(net, inputs, *args, **kwargs)

    trainer.compute_loss = counting

    def train() -> None:
        try:
            trainer.train()
        except Exception:  # noqa: BLE001 - whoever waits for a step sees the process end
            traceback.print_exc()
        os._exit(1)

    Thread(target=train, daemon=True).start()
    while True:
        go.put(True)
        yield done.get()


def main(
    contender: str, task: str, file: str, model: str, precision: str, batch: str, threads: str, rounds: str
) -> None:
    """Make a step for each line on stdin; after it, and before the first, write a line of JSON."""
    torch.set_num_threads(int(threads))
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    if task != "sample":
        rows = rows[: int(batch) * (int(rounds) + 2)]  # nothing is read that no step needs, but a batch to spare
    trainers = {"ours": ours, "trl": trl, "peft": partial(plain, bare=False), "bare": partial(plain, bare=True)}
    make: Any = partial(sampled, ours=contender == "ours") if task == "sample" else trainers[contender]
    run(make(task, rows, model, precision, int(batch)))


def run(steps: Iterator[Step]) -> None:
    """Makes the first step, which is not timed, and one more for each line on stdin."""
    began = time.perf_counter()
    next(steps)  # warm, and all that is set up

    def say(result: dict[str, float]) -> None:
        # A line of its own, in one piece: a trainer prints from a thread of its own.
        sys.__stdout__.write(f"\n{json.dumps(result)}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]

    say({"start": time.perf_counter() - began})
    for _ in sys.stdin:
        began = time.perf_counter()
        tokens, loss = next(steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        say({"tokens": tokens, "loss": loss, "seconds": time.perf_counter() - began, "gb": peak})


if __name__ == "__main__":
    main(*sys.argv[1:])
