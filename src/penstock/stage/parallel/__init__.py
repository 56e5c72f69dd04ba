"""Stages whose layers several processes share: FSDP2 and tensor parallelism of torch."""
