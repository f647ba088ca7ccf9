# fish completion of kvferry: the command itself says what it takes.
kvferry completion fish | source
