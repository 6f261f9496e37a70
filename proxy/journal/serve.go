package journal

import (
	"context"

	"google.golang.org/grpc"
)

// Register serves the Log's Read to other nodes.
func Register(s grpc.ServiceRegistrar, l *Log) {}

// ReadFrom is Log.Read of another node. fn must not keep u.
func ReadFrom(ctx context.Context, conn grpc.ClientConnInterface, q Query, fn func(u *Usage) error) error {
	return errSkeleton
}

// GroupFrom adds to g what q picks of another node; the grouping happens there, in g's
// location. On an error g is as it was.
func GroupFrom(ctx context.Context, conn grpc.ClientConnInterface, q Query, g *Groups) error {
	return errSkeleton
}
