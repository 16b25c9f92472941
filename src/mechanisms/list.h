// Every operator of the library, in the order of `linnet list`: one line per operator.
LINNET_OP(softmax)
LINNET_OP(softmax_decode)
LINNET_OP(softmax_paged)
LINNET_OP(softmax_merge)
LINNET_OP(linear)
LINNET_OP(linear_decode)
