"""Each rank sends all its tokens of an expert to one replica, the nearest where there is one."""
