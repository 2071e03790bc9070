"""Instruction following as Gymnasium environments: single, batched and token by token."""
