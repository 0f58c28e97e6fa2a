"""One file per convert-moss command: parse, call one library function, print."""
