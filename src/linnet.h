// The public interface of Linnet: one include for everything.
#pragma once

#include "core/executor.h"
#include "core/op.h"
#include "core/status.h"
#include "core/view.h"
#include "mechanisms/distill/distill.h"
#include "mechanisms/features/features.h"
#include "mechanisms/hierarchical/hierarchical.h"
#include "mechanisms/inline/inline.h"
#include "mechanisms/linear/linear.h"
#include "mechanisms/monarch/monarch.h"
#include "mechanisms/softmax/softmax.h"
#include "mechanisms/taylor/taylor.h"
