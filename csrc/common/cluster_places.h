// How many clusters of blocks run at once. A cluster lies in one GPC, GPCs have 16 or 18 multiprocessors or fewer, and
// which ones differs between GPUs of the same name: of clusters of 2 to 8 blocks with a multiprocessor each one H200 of
// 132 multiprocessors runs 66, 39, 30, 22, 17, 15 and 15. One cluster more waits for a second wave.
#pragma once

#include "launch.h"

namespace nvb {

// Clusters of `cluster` blocks that run at once on the current device, one block on a multiprocessor; at least 1. The
// device is asked once for each size up to 16, from capability 9.0 on; where it has no answer, it is as many as fill 85
// % of the multiprocessors. Of clusters of more than 8 blocks, which not every device has, it may be 0.
int cluster_places(const nvb_launch& launch, int cluster);

}  // namespace nvb
