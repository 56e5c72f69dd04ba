"""`ps.Pipe`, an nn.Module with the interface of torchgpipe and FairScale."""
