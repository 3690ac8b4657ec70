"""What only a training loop uses. Nothing else in the core imports this package.

`precision` trains in the precision that the engine serves, `correction` corrects for the mismatch between the two. `peft`
merges LoRA adapters into the policy, `noise` adds QeRL's to its norms, and `megatron` names the tensors of Megatron's ranks.
"""
