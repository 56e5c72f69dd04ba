"""The CSV format of torch.distributed.pipelining."""
