// Every kind of vector file that is no call of an operator: one line each, for a function `const FileKind& NAME_files()`.
LINNET_FILE_KIND(tasks)
LINNET_FILE_KIND(icl)
LINNET_FILE_KIND(dsf)
LINNET_FILE_KIND(layer)
