//! Jobs, measurement, statistics and reports: what a DMA policy costs on this machine
