"""Translation of run files of other frameworks (ROLL, verl, NeMo RL) into run files of this one."""
