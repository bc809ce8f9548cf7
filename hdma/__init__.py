"""hdma: AllGather and ReduceScatter by copy engines inside a node and RDMA between nodes."""

__version__ = "0.1.0"
