// Tiles to choose among: head_dim, warpgroups that multiply, keys, whether they take turns, and keys between flushes.
// attention_prefill_fp8.sh makes a unit of each line.
NVB_CANDIDATE(64, 3, 128, false, 512)
NVB_CANDIDATE(64, 3, 128, false, 1024)
NVB_CANDIDATE(64, 3, 128, true, 1024)
NVB_CANDIDATE(128, 2, 192, true, 384)
NVB_CANDIDATE(128, 2, 192, true, 960)
NVB_CANDIDATE(128, 2, 192, true, 2048)
NVB_CANDIDATE(128, 2, 192, false, 960)
NVB_CANDIDATE(128, 2, 192, true, 1048576)
NVB_CANDIDATE(128, 2, 128, true, 1024)
NVB_CANDIDATE(256, 2, 128, true, 2048)
NVB_CANDIDATE(256, 2, 128, true, 4096)
