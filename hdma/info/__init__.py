"""The doctor: what hdma finds on this machine and in this job, what is wrong with it, and what to do about it.

`python -m hdma.info` alone looks at this host; under mpirun, torchrun or srun all ranks join and rank 0 reports.
"""
