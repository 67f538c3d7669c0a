/* What wire.c needs of registry.c besides fabric.h. */
#ifndef FABRIC_REGISTRY_H
#define FABRIC_REGISTRY_H

/* A number for this process that no living one of the run has. */
unsigned fabric_registry_join(void);

#endif
