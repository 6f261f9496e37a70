// Package nginx configures nginx as a peer of benchmarks: one worker, which is what a node of Headgate is beside it, that
// passes requests on as they come and answers as they arrive.
//
// It fails where a folder cannot be written. It starts nothing; whoever runs the command that [Config.Command] returns ends it.
package nginx

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// None is the command that leaves nginx out.
const None = "none"

// Find is the command of nginx: the one given, else where it is found, else [None].
func Find(command string) string {
	if command != "" {
		return command
	}
	for _, name := range []string{"nginx", "/usr/sbin/nginx"} { // Debian has it off the path of users
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return None
}

// Config is what nginx is to do.
type Config struct {
	Path     string // of the command
	Dir      string // to make and to work in
	Listen   string // host:port
	Upstream string // host:port
	// Connections at once, and to the upstream those that stay open.
	Connections, KeepAlive int
	// MaxConns lets no more requests through at once; 0 is as many as come.
	MaxConns int
}

// Command writes the configuration and returns what to start. It stays in the foreground, in one process.
func (c *Config) Command() ([]string, error) {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil { // its workers may be another user's
		return nil, fmt.Errorf("nginx: %w", err)
	}
	limit := ""
	if c.MaxConns > 0 {
		limit = fmt.Sprintf(" max_conns=%d", c.MaxConns)
	}
	text := fmt.Sprintf(`daemon off;
master_process off;
pid nginx.pid;
error_log stderr crit;
events { worker_connections %d; }
http {
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  keepalive_requests 1000000;
  upstream up { server %s%s; keepalive %d; keepalive_requests 1000000; }
  server {
    listen %s backlog=4096;
    location / {
      proxy_pass http://up;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_next_upstream off;
    }
  }
}
`, c.Connections, strings.TrimPrefix(c.Upstream, "http://"), limit, c.KeepAlive, c.Listen)
	conf := filepath.Join(c.Dir, "nginx.conf")
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil { // as above
		return nil, fmt.Errorf("nginx: %w", err)
	}
	return []string{c.Path, "-p", c.Dir, "-c", conf}, nil
}
