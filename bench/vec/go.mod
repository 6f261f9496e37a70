module headgate/bench/vec

go 1.26.0

require (
	github.com/viterin/vek v0.4.3
	headgate v0.0.0
)

require (
	github.com/chewxy/math32 v1.10.1 // indirect
	github.com/viterin/partial v1.1.0 // indirect
	golang.org/x/exp v0.0.0-20230817173708-d852ddb80c63 // indirect
	golang.org/x/sys v0.50.0 // indirect
)

replace headgate => ../..
