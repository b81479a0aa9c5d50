/* Nothing but a name: the tests build it as libc10_cuda.so, by which the shim knows a program that caches memory. */
int caching;
