"""A coverage-guided fuzzer of every place where bytes from strangers become values: `make fuzz`.

`targets` and `messages` hold the functions that take an input and judge what became of it, `seeds` valid inputs to
start from, `mutators` how to change them; none of these needs atheris. `child` is the process that fuzzes one target,
`__main__` the driver. `corpus/TARGET/` keeps inputs that fuzzing found, one for each way through the code;
tests/test_fuzz_corpus.py runs them all.
"""
