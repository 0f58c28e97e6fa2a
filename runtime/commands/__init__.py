"""One file per run-om command: parse, call one library function, print."""
